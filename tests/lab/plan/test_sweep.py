"""In simulated time, choosing every round is never slower than the target alone, nor than the best of what is
the same in all rounds: the sweep's own simulation, of few rows."""

from __future__ import annotations

import pytest

from specdist.policies.payoff import RoundChooser, RoundShape
from tests.lab.plan.sweep import automatic
from tests.lab.plan.timed_costs import ratio
from tests.lab.plan.virtual_rounds import LONGEST, SHORTEST, Machine, Setting, Simulation

NEVER_BELOW, NEAR_BEST = 0.98, 0.95


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.of("70b", "1b", "h100-sxm", 4)


@pytest.mark.parametrize(
    ("num_slots", "context", "acceptance", "shape", "length"),
    [
        (1, 2000, (0.8, 0.8), RoundShape(num_ahead=9, num_branches=8), 8),
        # A draft that was right, and is wrong all of a sudden.
        (8, 100, (0.9, 0.3), RoundShape(num_ahead=6, num_branches=8), 5),
        (128, 100, (0.1, 0.1), RoundShape(drafts_now=True), 1),
    ],
)
def test_every_round_chosen_is_as_good_as_the_best_that_stays_the_same(
    machine: Machine,
    num_slots: int,
    context: int,
    acceptance: tuple[float, float],
    shape: RoundShape,
    length: int,
) -> None:
    setting = Setting(
        num_slots=num_slots, context_tokens=context, acceptance=acceptance, catching=0.7,
        num_rows=max(3, num_slots),
    )  # fmt: skip
    found = automatic(machine, setting).run()
    assert found >= NEVER_BELOW * Simulation(machine, setting).run()
    assert found >= NEAR_BEST * Simulation(machine, setting, shape=shape, length=length).run()


@pytest.mark.parametrize(("num_slots", "acceptance"), [(4, (0.8, 0.8)), (64, (0.9, 0.2)), (64, (0.2, 0.9))])
def test_so_it_is_where_blocks_have_one_length(
    machine: Machine, num_slots: int, acceptance: tuple[float, float]
) -> None:
    """Nothing but the kind of round adapts: with this length each kind is the best somewhere."""
    setting = Setting(num_slots=num_slots, context_tokens=100, acceptance=acceptance, num_rows=2 * num_slots)
    costs = machine.measured(num_slots, setting.context_tokens + (SHORTEST + LONGEST) // 4)
    chooser = RoundChooser(costs, max_draft_tokens=5, fixed_length=5, branch_counts=(0, 8))
    found = Simulation(machine, setting, chooser=chooser, length=5).run()
    shapes = [RoundShape(drafts_now=True), RoundShape(num_ahead=6), RoundShape(num_ahead=6, num_branches=8)]
    fixed = [Simulation(machine, setting, shape=shape, length=5).run() for shape in shapes]
    alone = Simulation(machine, setting).run()
    assert found >= NEVER_BELOW * alone and found >= NEAR_BEST * max(fixed)


@pytest.mark.parametrize(("budget_s", "num_timed"), [(0.0, 2), (3.0, 9)])
def test_a_few_timed_passes_are_decided_by_as_all_sizes_are(
    machine: Machine, budget_s: float, num_timed: int
) -> None:
    setting = Setting(num_slots=8, context_tokens=100, acceptance=(0.8, 0.8), catching=0.7, num_rows=32)
    kept, num_sizes = ratio(machine, setting, budget_s, noise=0.01)
    assert kept >= NEVER_BELOW and num_sizes == num_timed
