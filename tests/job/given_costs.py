"""The main job on a machine whose passes take given times; called in the ranks' processes."""

from __future__ import annotations

from collections.abc import Sequence

from specdist.cli import generate
from specdist.job.costs import corrections, measuring
from specdist.job.costs.measuring import ModelTimes
from specdist.job.replica import replica
from specdist.policies import pass_ratios
from specdist.policies.costs import CostModel, Curve


def give(pass_ns: int) -> None:
    """A target pass takes so long, and a draft step a millisecond."""
    costs = CostModel(Curve([1], [pass_ns]), Curve([1], [1_000_000]))
    measuring.combined_costs = lambda *_: costs
    replica.rehearsed_costs = lambda given, *_: given


def generate_with_long_passes(arguments: Sequence[str]) -> int:
    give(8_000_000)
    return generate(arguments)


def generate_with_short_passes(arguments: Sequence[str]) -> int:
    give(3_000_000)
    return generate(arguments)


def give_in_turn(steps_ns: Sequence[int]) -> None:
    """A pass of the target is measured to take 20 ms; a draft step so long the first time, and so on; the
    last again and again."""
    steps = [*steps_ns]

    def draft(*_: object, **__: object) -> ModelTimes:
        return ModelTimes(Curve([1, 1000], [steps.pop(0) if len(steps) > 1 else steps[0]] * 2), (0.0, 0.0))

    target = ModelTimes(Curve([1, 1000], [20_000_000] * 2), (0.0, 0.0))
    measuring.measure_target, measuring.measure_draft = lambda *_, **__: target, draft
    replica.rehearsed_costs = lambda given, *_: given


def generate_after_a_busy_start(arguments: Sequence[str]) -> int:
    """The first time a draft step is measured to take a second."""
    give_in_turn([1_000_000_000, 1_000_000])
    corrections.MANY_PASSES, pass_ratios.LEAST_COMPARED = 5, 10**6
    return generate(arguments)
