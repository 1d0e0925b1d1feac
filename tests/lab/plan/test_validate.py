"""The arithmetic of a comparison; times are given, and none is asserted."""

from __future__ import annotations

import pytest

from specdist.data.stats.fields import DraftTimes, TargetTimes
from specdist.data.stats.shard import Stats
from specdist.lab.plan.simulate import ReplicaCosts, Settings
from specdist.policies.costs import CostModel, Curve
from tests.lab.plan.events import RowLengths, run_job
from tests.lab.plan.validate import (
    Validation,
    acceptance_rate,
    calibrated,
    fastest_costs,
    row_acceptance,
)

US = 1000
COSTS = ReplicaCosts(
    passes=CostModel(Curve([1, 8], [100 * US, 100 * US]), Curve([1, 8], [10 * US, 10 * US])),
    draft_prefill=Curve([1], [0]),
    round_s=0.0,
    proposal_s=0.0,
)


def run_of(length: int) -> Stats:
    """Ten rounds of one row: passes of 100 and of 10 us, and beside them 20 us a round, and of a proposal
    15 us, 10 of them the target's, and 3 us a draft step."""
    rounds = 10
    return Stats(
        num_rounds=rounds,
        num_target_passes=rounds,
        num_row_steps=rounds,
        num_draft_passes=rounds * length,
        num_draft_tokens=rounds * length,
        target_ns=TargetTimes(
            prefill=999,
            verify=rounds * (112 + 10 * (length > 0)) * US,
            host=rounds * 8 * US,
            idle=rounds * (5 * (length > 0) + 13 * length) * US + 777,
        ),
        draft_ns=DraftTimes(prefill=777, draft=rounds * 13 * length * US),
    )  # fmt: skip


def test_what_the_engine_adds_is_found_in_three_runs() -> None:
    found = calibrated(COSTS, run_of(0), [run_of(1), run_of(4)])
    assert found.round_s == pytest.approx(20e-6)
    assert found.proposal_s == pytest.approx(15e-6)
    assert found.passes.draft.ns == [13 * US, 13 * US]
    assert found.passes.target == COSTS.passes.target


def test_acceptance_is_that_of_the_verified_candidates() -> None:
    stats = Stats()
    for num_accepted in (3, 0, 1, 3):
        stats.observe_block(num_drafted=3, num_accepted=num_accepted)
    # Seven accepted, and two rejected; three after these were not verified.
    assert acceptance_rate(stats) == pytest.approx(7 / 9)


def test_a_row_s_own_acceptance_is_that_of_its_blocks() -> None:
    # 0.5 + 0.25 + 0.125 per block of three; all of them; and nothing is known without blocks.
    assert row_acceptance(7, 8, 3) == pytest.approx(0.5, abs=1e-5)
    assert row_acceptance(24, 8, 3) == pytest.approx(1.0, abs=1e-5)
    assert row_acceptance(0, 8, 3) == pytest.approx(0.0, abs=1e-5)
    assert row_acceptance(0, 0, 3) is None


def test_rows_with_an_acceptance_of_their_own_take_as_many_rounds() -> None:
    """Blocks of 3 of which all or none are accepted: a prompt's round, then 3 rounds for 13 tokens or 12."""
    settings = Settings(mode="colocated", num_rows=1, num_draft_tokens=3, acceptance=0.5)
    for acceptance, num_rounds in ((1.0, 1 + 3), (0.0, 1 + 12)):
        found = run_job(COSTS, settings, [RowLengths(2, 13, acceptance)])
        assert found.num_rounds == num_rounds


def test_the_fastest_repeat_counts() -> None:
    found = Validation(
        num_rows=1,
        num_draft_tokens=3,
        acceptance=0.8,
        measured_tokens_per_s=[100.0, 50.0, 200.0],
        predicted_tokens_per_s=220.0,
    )
    assert found.errors == pytest.approx([1.2, 3.4, 0.1])
    assert found.error == pytest.approx(0.1)


def test_of_several_measurements_the_fastest_of_each_size_counts() -> None:
    other = ReplicaCosts(
        CostModel(Curve([1, 8], [50 * US, 500 * US]), COSTS.passes.draft), COSTS.draft_prefill, 0.0, 0.0
    )
    assert fastest_costs([COSTS, other]).passes.target.ns == [50 * US, 100 * US]
