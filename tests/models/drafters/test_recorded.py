"""Recorded passes of drafters, and of their targets, against passes that are not: every block, and its
probabilities."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import numpy as np
import pytest

from specdist.models.drafters.runner import DrafterRunner
from specdist.models.drafters.states import StatesRunner
from specdist.models.passes.runner import Acceleration
from specdist.sampling.distributions import SamplingSettings
from tests.engine import eagle, mtp
from tests.engine.harness import requests_for
from tests.engine.test_eagle import CROWDED, prompts_of_lengths
from tests.models.tape import TapeCapturer

VOCAB_SIZE = 24
IDS = [*range(1, 9), 11, 12, *range(14, 22)]


def eagle3() -> tuple[Any, ...]:
    target = eagle.eagle_target(VOCAB_SIZE)
    return eagle.EagleHarness, target, eagle.eagle_model(target, IDS)


def head(family: str) -> tuple[Any, ...]:
    target = mtp.mtp_target(family, VOCAB_SIZE)
    return mtp.MtpHarness, target, mtp.mtp_head(target)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("eagle3", SamplingSettings()), ("deepseek_v3", SamplingSettings(is_coupled=True))],
    ids=["eagle3", "deepseek_v3"],
)
def test_blocks_of_recorded_passes_are_those_of_others(
    kind: str, settings: SamplingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of an earlier round, pages that a sequence has had before, or a first token that is seen would
    give other probabilities."""
    harness, *models = eagle3() if kind == "eagle3" else head(kind)
    replicas, capturers = [], [TapeCapturer() for _ in range(2)]
    for is_recorded in (False, True):
        for runner, capturer in zip((StatesRunner, DrafterRunner), capturers, strict=True):
            acceleration = Acceleration(is_static=is_recorded, capturer=capturer if is_recorded else None)
            own = partialmethod(runner.__init__, acceleration=acceleration)
            monkeypatch.setattr(runner, "__init__", own)
        replica = harness(*models, settings=settings, max_new_tokens=14, **CROWDED | {"num_pages": 12})
        replicas.append(
            (replica, replica.generate(requests_for(prompts_of_lengths(1, 17, 2, 26), num_samples=2)))
        )
        monkeypatch.undo()
    (eager, expected), (recorded, found) = replicas
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert recorded.stats_recorder.close_shard(0).num_preemptions > 0
    assert len(recorded.blocks) == len(eager.blocks) > 30
    for one, other in zip(recorded.blocks, eager.blocks, strict=True):
        assert (one.committed, one.candidates) == (other.committed, other.candidates)
        np.testing.assert_allclose(one.probabilities, other.probabilities, rtol=1e-4, atol=1e-7)
    assert recorded.draft_runner.runs is not None
    assert all(capturer.num_replays > 2 * capturer.num_captures > 0 for capturer in capturers)
