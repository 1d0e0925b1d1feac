"""Scores of drafted tokens are found again, whichever steps they are of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdist.engine.draft.steps.draft_state import NO_POSITION, StepScores

NUM_SLOTS, NUM_STEPS, VOCAB_SIZE = 5, 4, 7


@pytest.mark.parametrize("kind", ["all of them known", "some nowhere", "some certain", "none"])
def test_scores_are_those_of_their_places(kind: str) -> None:
    scores = StepScores(NUM_SLOTS, NUM_STEPS + 1, VOCAB_SIZE, torch.device("cpu"))
    kept = torch.rand(NUM_STEPS, NUM_SLOTS, VOCAB_SIZE)
    lent = kept[0].clone()
    for step, slots in enumerate(([4, 1, 0, 2, 3], [0, 2, 4], [2, 0], [3])):
        if step == 3:
            scores.own()
            lent.fill_(8.0)
        lent = kept[step].clone()
        scores.keep((np.array(slots), np.full(len(slots), step)), lent, np.array(slots))
    slots_W, positions_W = np.array([2, 3, 0, 2, 4, 1]), np.array([2, 3, 1, 0, 1, 0])
    expected_WV = kept[positions_W, slots_W]
    if kind == "some nowhere":
        positions_W[[0, 4]], expected_WV[[0, 4]] = NO_POSITION, 0.0
    if kind == "some certain":
        scores.keep_certain((slots_W[1:3], positions_W[1:3]), np.array([5, 6]))
        expected_WV[1:3] = 0.0
        expected_WV[[1, 2], [5, 6]] = 9.0
    if kind == "none":
        positions_W[:], expected_WV = NO_POSITION, torch.zeros(6, VOCAB_SIZE)
    assert scores.at(slots_W, positions_W, certainty=9.0).equal(expected_WV)
