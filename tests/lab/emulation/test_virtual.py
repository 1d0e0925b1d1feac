"""Virtual time: what a round takes is what its passes, messages and hosts take."""

from __future__ import annotations

import pytest

from specdist.policies.choice import PolicyChoice
from tests.lab.emulation.config import EmulationConfig
from tests.lab.emulation.run import Emulation
from tests.lab.emulation.virtual import (
    ASYNCHRONOUS_NS,
    MESSAGE_NS,
    ROUND_NS,
    SYNCHRONOUS_NS,
    draining,
    tokens_per_s,
)

LENGTH, OUTPUT = 2, 120


@pytest.mark.parametrize("mode", ["colocated", "synchronous", "asynchronous"])
def test_a_round_takes_what_its_parts_take(mode: str) -> None:
    """Every token is accepted, so that every round is like every other."""
    config = EmulationConfig(
        emulate="h100-sxm", target="8b", draft="0.5b", acceptance=1.0, batch_sizes=[1], rounds=12,
        prompt_tokens=64, output_tokens=OUTPUT,
    )  # fmt: skip
    choice = PolicyChoice.of("fixed", num_draft_tokens=LENGTH)
    found = tokens_per_s(config, mode, choice)
    emulation = Emulation(config)
    target_s, step_s, first_s = (
        at.pass_s(size, 1)
        for at, size in ((emulation.target, LENGTH + 1), (emulation.draft, 1), (emulation.draft, 2))
    )
    # After a block that was accepted whole the draft runs its last token, too.
    drafting_s = first_s + (LENGTH - 1) * step_s
    if mode == "asynchronous":
        # One more stands for the next token; the draft is done before the target.
        drafting_s = LENGTH * step_s + ASYNCHRONOUS_NS / 1e9
        assert drafting_s < target_s
        expected_s = target_s + (MESSAGE_NS + ROUND_NS) / 1e9
    else:
        hosts_ns = ROUND_NS + (MESSAGE_NS + SYNCHRONOUS_NS if mode == "synchronous" else 0)
        expected_s = target_s + drafting_s + hosts_ns / 1e9
    assert found == pytest.approx((LENGTH + 1) / expected_s, rel=0.01)


@pytest.mark.parametrize("mode", ["colocated", "auto"])
def test_a_draining_batch_gets_longer_blocks_and_more_branches(mode: str) -> None:
    """The fewer sequences run, the less of a pass is bound by arithmetic."""
    config = EmulationConfig(
        emulate="h100-sxm", target="70b", draft="1b", tp_size=4, acceptance=0.8, batch_sizes=[96],
        prompt_tokens=32, output_tokens=160,
    )  # fmt: skip
    rounds = draining(config, mode, PolicyChoice.of("goodput"), num_last=4)
    full, last = (rounds[rounds[:, 0] == count].sum(axis=0) for count in (96, 4))
    # Of a sequence: candidates, and branches.
    assert last[1] / last[0] > 1.5 * full[1] / full[0]
    assert mode == "colocated" or last[2] / last[0] > 1.5 * full[2] / full[0]


def test_every_round_chosen_is_as_fast_as_the_best_that_stays_the_same() -> None:
    """A batch whose passes are as long as the candidates are many, and a fixed length that is too long for
    it: blocks ahead are shorter, and the same sequences are drafted for as where every round has branches."""
    config = EmulationConfig(
        emulate="h100-sxm", target="70b", draft="1b", tp_size=4, batch_sizes=[64], rounds=48,
        prompt_tokens=128, output_tokens=256,
    )  # fmt: skip
    fixed, goodput = PolicyChoice.of("fixed", num_draft_tokens=8), PolicyChoice.of("goodput")
    best = tokens_per_s(config, "branches", fixed)
    for choice in (fixed, goodput):
        assert tokens_per_s(config, "auto", choice) >= 0.98 * best


def test_a_draft_that_is_never_right_costs_an_auto_run_nothing() -> None:
    """At most a fiftieth of the target's own rate: it is listened to, now and then."""
    config = EmulationConfig(
        emulate="h100-sxm", target="8b", draft="0.5b", acceptance=0.0, batch_sizes=[4], rounds=80,
        prompt_tokens=64, output_tokens=300,
    )  # fmt: skip
    alone, chosen = (
        tokens_per_s(config, "auto", choice) for choice in (PolicyChoice(), PolicyChoice.of("goodput"))
    )
    assert chosen >= 0.98 * alone
