"""What a draft's rounds take beyond their steps is measured with rounds of the run's own code."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest

from specdist.config.arguments import parse_arguments
from specdist.job.costs import measuring
from specdist.job.costs.pass_times import Budget, always
from specdist.job.costs.round_times import MOST_ASYNCHRONOUS_STEPS, MOST_STEPS, drafting_curves
from specdist.job.run.workload import Workload
from specdist.models.passes.runner import ModelRunner
from specdist.policies.costs import Curve
from specdist.sampling.processing.options import Processing
from tests.lab.emulation.config import EmulationConfig
from tests.lab.emulation.run import Emulation
from tests.lab.emulation.sides import DraftServer, EmulatedOrder

NUM_ROWS = 3
SECOND = 10**9


@pytest.fixture(scope="module")
def served() -> tuple[DraftServer, EmulatedOrder]:
    arguments = ["--emulate", "b200", "--target", "350m", "--draft", "5m", "--prompt_tokens", "20",
                 "--output_tokens", "24", "--batch_sizes", str(NUM_ROWS), "--modes", "auto"]  # fmt: skip
    emulation = Emulation(parse_arguments(EmulationConfig, arguments))
    *_, case = emulation.cases()
    server, order = emulation.draft_server(), emulation.order(case)
    server.build(order)
    return server, order


@pytest.mark.parametrize("uses_features", [False, True])
@pytest.mark.parametrize("num_branches", [0, 2])
def test_what_every_step_takes_is_found_apart_from_the_rest_of_a_round(
    served: tuple[DraftServer, EmulatedOrder], num_branches: int, uses_features: bool
) -> None:
    """Passes said to take a second less than nothing: every step takes a second more than its pass."""
    server, order = served
    # Options of rows need not be known for it.
    settings = dataclasses.replace(order.assembly.settings, processing=Processing(min_new_tokens=1))
    synchronous, asynchronous, steps = drafting_curves(
        dataclasses.replace(order.assembly, settings=settings),
        cast(ModelRunner, server._runner),
        lambda size: -SECOND,
        num_rows=NUM_ROWS,
        num_branches=num_branches,
        uses_features=uses_features,
        fits=always,
    )
    assert synchronous.sizes == asynchronous.sizes == [1, NUM_ROWS]
    assert steps.sizes == [size * (1 + num_branches) for size in synchronous.sizes]
    assert [round(ns / SECOND) for ns in steps.ns] == [1, 1]
    assert max(*synchronous.ns, *asynchronous.ns) < SECOND / 2


@pytest.mark.parametrize("num_branches", [0, 2])
def test_the_passes_of_steps_are_not_counted(
    served: tuple[DraftServer, EmulatedOrder], num_branches: int
) -> None:
    """A second less than nothing for every sequence and branch shows how many a step has."""
    server, order = served
    *_, steps = drafting_curves(
        order.assembly,
        cast(ModelRunner, server._runner),
        lambda size: -SECOND * size,
        num_rows=NUM_ROWS,
        num_branches=num_branches,
        uses_features=True,
        fits=always,
    )
    assert [round(ns / SECOND) for ns in steps.ns] == steps.sizes


def test_a_draft_measures_its_host_beside_its_passes(served: tuple[DraftServer, EmulatedOrder]) -> None:
    """Without the times of the emulated passes, which are twenty times as long here."""
    server, order = served
    pace = server._runner.pace
    known_ns = pace._known_ns
    pace._known_ns = lambda *sizes: 20 * known_ns(*sizes)  # type: ignore[assignment, misc]
    synchronous, asynchronous, steps = server.measure(order)
    pace._known_ns = known_ns
    pass_ns = 20 * known_ns(1, 1, 0, None)
    assert steps.ns[0] < pass_ns
    assert 0 < asynchronous.ns[0] + MOST_ASYNCHRONOUS_STEPS * steps.ns[0] < MOST_ASYNCHRONOUS_STEPS * pass_ns
    assert 0 < synchronous.ns[0] + MOST_STEPS * steps.ns[0] < MOST_ASYNCHRONOUS_STEPS * pass_ns


def test_a_step_costs_its_pass_and_what_the_host_adds_to_it(
    served: tuple[DraftServer, EmulatedOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, order = served
    nothing = Curve([1], [0])
    monkeypatch.setattr(
        measuring, "drafting_curves", lambda *args, **options: (nothing, nothing, Curve([1], [SECOND]))
    )
    times = [
        measuring.measure_draft(
            order.assembly,
            cast(ModelRunner, server._runner),
            num_branch_slots=NUM_ROWS,
            workload=Workload(num_context_tokens=8),
            budget=Budget(SECOND),
            uses_features=True,
            chooses_rounds=chooses_rounds,
        )
        for chooses_rounds in (False, True)
    ]
    alone, beside = (each.passes.ns for each in times)
    assert max(alone) < SECOND <= min(beside)
