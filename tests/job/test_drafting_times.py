"""What a draft's rounds take beyond their steps is measured with rounds of the run's own code."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest

from specdist.config.arguments import parse_arguments
from specdist.emulation.config import EmulationConfig
from specdist.emulation.run import Emulation
from specdist.emulation.sides import DraftServer, EmulatedOrder
from specdist.job.measuring import MOST_STEPS, MOST_STEPS_AHEAD, drafting_curves
from specdist.models.runner import ModelRunner
from specdist.sampling.options import Processing

NUM_ROWS = 3
SECOND = 10**9


@pytest.fixture(scope="module")
def served() -> tuple[DraftServer, EmulatedOrder]:
    arguments = ["--emulate", "b200", "--target", "350m", "--draft", "5m", "--prompt_tokens", "20",
                 "--output_tokens", "24", "--batch_sizes", str(NUM_ROWS), "--modes", "auto"]  # fmt: skip
    emulation = Emulation(parse_arguments(EmulationConfig, arguments))
    *_, case = emulation.cases()
    server, order = emulation.side().open(), emulation.order(case)
    server.build(order)
    return server, order


@pytest.mark.parametrize("uses_features", [False, True])
@pytest.mark.parametrize("num_branches", [0, 2])
def test_the_steps_of_both_kinds_of_round_are_not_counted(
    served: tuple[DraftServer, EmulatedOrder], num_branches: int, uses_features: bool
) -> None:
    """A step that took a second less than nothing for every sequence shows how many there are: in turns as
    many as the policy may take, ahead one more, and in all but the first the branches."""
    server, order = served
    # Options of rows need not be known for it.
    settings = dataclasses.replace(order.assembly.settings, processing=Processing(min_new_tokens=1))
    turns, ahead = drafting_curves(
        dataclasses.replace(order.assembly, settings=settings),
        cast(ModelRunner, server._runner),
        lambda size: -SECOND * size,
        num_branches=num_branches,
        uses_features=uses_features,
    )
    assert turns.sizes == ahead.sizes == [1, NUM_ROWS]
    for num_rows, in_turns_ns, ahead_ns in zip(turns.sizes, turns.ns, ahead.ns, strict=True):
        assert in_turns_ns // SECOND == num_rows * MOST_STEPS
        assert ahead_ns // SECOND == num_rows * (1 + MOST_STEPS_AHEAD * (1 + num_branches))


def test_a_draft_measures_its_host_beside_its_passes(served: tuple[DraftServer, EmulatedOrder]) -> None:
    """Without the times of the emulated passes, which are twenty times as long here."""
    server, order = served
    pace = server._runner.pace
    known_ns = pace._known_ns
    pace._known_ns = lambda *sizes: 20 * known_ns(*sizes)  # type: ignore[assignment, misc]
    turns, ahead = server.measure(order)
    pace._known_ns = known_ns
    longest_ns = 20 * MOST_STEPS_AHEAD * known_ns(1, 1, 0)
    assert 0 < turns.ns[0] < longest_ns and 0 < ahead.ns[0] < longest_ns
