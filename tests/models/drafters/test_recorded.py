"""Recorded passes of drafters, and of their targets, against passes that are not: every block, and its
probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdist.models.drafters.runner import DrafterRunner
from specdist.models.passes.acceleration import Acceleration
from specdist.sampling.distributions import SamplingSettings
from tests.engine import block_drafters, eagle, mtp
from tests.engine.harness import requests_for
from tests.engine.test_eagle import CROWDED, IDS, VOCAB_SIZE, prompts_of_lengths
from tests.models.tape import TapeCapturer


def models_of(kind: str) -> tuple[Any, ...]:
    """Harness, target and draft, and what gives the expected probabilities of a block."""
    if kind in mtp.FAMILIES:
        target = mtp.mtp_target(kind, VOCAB_SIZE)
        return mtp.MtpHarness, target, mtp.mtp_head(target), mtp.expected_probabilities
    target = eagle.eagle_target(VOCAB_SIZE)
    if kind == "dflash":
        draft = block_drafters.block_drafter(target, IDS)
        return block_drafters.BlockHarness, target, draft, block_drafters.expected_probabilities
    draft = eagle.eagle_model(target, IDS, **(eagle.PEAGLE if kind == "peagle" else {}))
    return eagle.EagleHarness, target, draft, eagle.expected_probabilities


@pytest.mark.parametrize("kind", ["eagle3", "deepseek_v3", "dflash", "peagle"])
def test_blocks_of_recorded_passes_are_those_of_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of an earlier round, pages that a sequence has had before, or a first token that is seen would
    give other probabilities."""
    harness, *models, _ = models_of(kind)
    settings = SamplingSettings(is_coupled=kind == "deepseek_v3")
    replicas, capturers = [], list[TapeCapturer]()

    def recording(*_: Any, **options: Any) -> Acceleration:
        capturers.append(TapeCapturer())
        return Acceleration(is_static=True, capturer=capturers[-1])

    for is_recorded in (False, True):
        if is_recorded:
            monkeypatch.setattr(Acceleration, "of", recording)
        # On a device steps are taken together, in recorded runs.
        monkeypatch.setattr(DrafterRunner, "is_asynchronous", is_recorded)
        replica = harness(*models, settings=settings, max_new_tokens=14, **CROWDED | {"num_pages": 12})
        replicas.append(
            (replica, replica.generate(requests_for(prompts_of_lengths(1, 17, 2, 26), num_samples=2)))
        )
        monkeypatch.undo()
    (eager, expected), (recorded, found) = replicas
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    is_preempted = recorded.stats_recorder.close_shard(0).num_preemptions > 0
    is_block = recorded.draft_runner.blocks is not None
    assert is_preempted or is_block
    assert len(recorded.blocks) == len(eager.blocks) > 30
    for one, other in zip(recorded.blocks, eager.blocks, strict=True):
        assert (one.committed, one.candidates) == (other.committed, other.candidates)
        np.testing.assert_allclose(one.probabilities, other.probabilities, rtol=1e-4, atol=1e-7)
    runs = recorded.draft_runner.runs
    assert runs is None if is_block else runs._graphs._replays
    # The last two are the target's and the draft's.
    assert all(capturer.num_replays > 2 * capturer.num_captures > 0 for capturer in capturers[-2:])
