"""Targets that share an emulated draft, in processes of their own."""

from __future__ import annotations

import json

import pytest

from specdist.emulation.config import EmulationConfig
from specdist.emulation.results import EmulationResult
from specdist.emulation.run import run_emulation
from specdist.utils.errors import UserError

SMALL = {"emulate": "h100-sxm", "target": "70b", "draft": "1b", "tp_size": 4, "prompt_tokens": 40}


def test_two_targets_and_their_draft() -> None:
    """Whatever the machine: the tokens of a round follow from the acceptance, and the rest is counted."""
    config = EmulationConfig(
        **SMALL, batch_sizes=[2], modes=["branches"], num_targets=[2], policies=["fixed"],  # type: ignore[arg-type]
        output_tokens=60, rounds=20, slowdown=2,
    )  # fmt: skip
    result = run_emulation(config, "command")
    alone, shared = result.outcomes
    assert (alone.num_targets, shared.num_targets, shared.num_gpus) == (1, 2, 9)
    assert shared.num_branches > 0 and 1.5 < shared.tokens_per_round < 6
    assert shared.cores_used is not None and shared.cores_used > 0
    assert shared.planned_tokens_per_s is not None and alone.planned_tokens_per_s is not None
    assert shared.planned_tokens_per_s > 2 * alone.planned_tokens_per_s
    # Two targets, each of which runs two sequences, without what the host adds.
    per_target = shared.num_targets * 2 * shared.tokens_per_round / (shared.round_ms / 1e3)
    assert shared.tokens_per_s == pytest.approx(per_target, rel=0.1)
    again = EmulationResult.from_json(json.loads(json.dumps(result.to_json())))
    assert again.outcomes[1] == shared and "| targets |" in again.markdown()


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UserError, match=r"--acceptance_then 0\.5 is for a draft of one target"):
        EmulationConfig(**SMALL, num_targets=[2], acceptance_then=0.5)  # type: ignore[arg-type]
