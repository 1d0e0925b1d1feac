"""Goodput asked after many steps at once answers as if it had been asked after each."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

from specdist.policies import DraftSequences
from specdist.policies.costs import ContextCosts, CostModel, Curve
from tests.policies.goodput import CAP, a_pass, features_of, goodput, question

NUM_ROWS = 3
ROUNDS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"is_asynchronous": True},
    "asynchronous, a prompt": {"is_asynchronous": True, "num_prompt_tokens": 3},
    "little room": {"most_tokens": 4},
}


def costs(step: int) -> CostModel:
    """``step``: nanoseconds of a draft step for one sequence."""
    context = ContextCosts(num_rows=4, target_row_ns=3.0, target_token_ns=1.0, draft_row_ns=2.0)
    synchronous = asynchronous = Curve([1], [5])
    target, draft = Curve([1, 101], [100, 1100]), Curve([1, 4], [step, 2 * step])
    return CostModel(target, draft, context=context, synchronous=synchronous, asynchronous=asynchronous)


def asked_of(
    round_name: str,
    num_drafted: int,
    top_DR: np.ndarray,
    going: np.ndarray,
    known: slice | None,
) -> DraftSequences:
    """``going``: the rows; ``known``: the tokens since the last question, if there are any."""
    asked = question(NUM_ROWS, num_drafted, **ROUNDS[round_name])
    return dataclasses.replace(
        asked,
        slots_R=going,
        draft_slots_R=going,
        histories_RH=asked.histories_RH[going],
        features=None if known is None else features_of(top_DR[known][:, going]),
        round=dataclasses.replace(asked.round, num_context_tokens=700.0),
        reach_R=np.array([1.0, 0.9, 0.7])[going],
    )


@pytest.mark.parametrize("round_name", ROUNDS)
def test_asked_at_once_it_answers_what_it_would_have_step_by_step(round_name: str) -> None:
    """Also where sequences end on the way."""
    rng = np.random.default_rng(5)
    found = set()
    for _ in range(150):
        policy = goodput(costs(int(rng.integers(2, 40))), acceptance=rng.uniform(0.5, 0.95))
        policy.num_to_verify(features_of([0.5]), np.array([1]), a_pass(1))
        top_DR = 1 - rng.choice([0.1, 0.6, 1.0]) * rng.uniform(size=(CAP - 1, NUM_ROWS))
        most_R = rng.integers(1, CAP + 2, NUM_ROWS)
        patient, lengths_R = copy.deepcopy(policy), np.zeros(NUM_ROWS, int)
        for step in range(CAP):
            going = np.flatnonzero((lengths_R >= step) & (most_R > step))
            if len(going):
                known = slice(step - 1, step) if step else None
                asked = asked_of(round_name, step, top_DR, going, known)
                lengths_R[going] = np.where(patient.wants(asked) > step, step + 1, step)
        begun_R = policy.wants(asked_of(round_name, 0, top_DR, np.arange(NUM_ROWS), None))
        going = np.flatnonzero((begun_R > 0) & (most_R > 1))
        if len(going):
            asked = asked_of(round_name, CAP - 1, top_DR, going, slice(None))
            lengths_A = policy.wants(dataclasses.replace(asked, most_R=most_R[going]))
            expected_A = np.where(lengths_R[going] >= most_R[going], CAP, lengths_R[going])
            assert lengths_A.tolist() == expected_A.tolist()
            found |= set(lengths_R[going].tolist())
    assert len(found) >= 3, found
