"""The main job on a machine whose passes take given times; called in the ranks' processes."""

from __future__ import annotations

from collections.abc import Sequence

from specdist.cli import generate
from specdist.job.costs import measuring
from specdist.policies.costs import CostModel, Curve


def give(pass_ns: int) -> None:
    """A target pass takes so long, and a draft step a millisecond."""
    costs = CostModel(Curve([1], [pass_ns]), Curve([1], [1_000_000]))
    measuring.combined_costs = lambda *_: costs


def generate_with_long_passes(arguments: Sequence[str]) -> int:
    give(8_000_000)
    return generate(arguments)


def generate_with_short_passes(arguments: Sequence[str]) -> int:
    give(3_000_000)
    return generate(arguments)
