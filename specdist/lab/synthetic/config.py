"""The options of ``jobs/make_synthetic.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from specdist.config.arguments import option
from specdist.lab.synthetic.shapes import SHAPES
from specdist.utils.errors import UserError
from specdist.utils.rules import Rule, check_ranges, within

SHAPE = Rule(SHAPES.__contains__, f"is not a shape: choose one of {', '.join(SHAPES)}")
ACCEPTANCE, EPSILON = (
    within(above=0, at_most=1),
    within(at_least=0, below=math.inf, text="must be 0 or above"),
)
PAIR_SEED = Rule(lambda value: 0 <= value < 2**31, "must be in [0, 2**31)")


@dataclass(kw_only=True)
class SyntheticConfig:
    """Every option of the job. Raises :class:`UserError` for a value out of its range."""

    output: str = option(help="folder that gets target/, draft/ and synthetic.json")
    shape: str = option(rule=SHAPE, help=f"one of {', '.join(SHAPES)}")
    acceptance: float | None = option(
        None, rule=ACCEPTANCE, help="wanted greedy acceptance; the target is loaded to find it"
    )
    epsilon: float | None = option(
        None, rule=EPSILON, help="weight of the later layers instead; needs one layer's memory"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", help="of the stored weights")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="where --acceptance runs the target")
    seed: int = option(0, rule=PAIR_SEED, help="seed of the weights")

    def __post_init__(self) -> None:
        check_ranges(self)
        check_dial("shape", self.shape, acceptance=self.acceptance, epsilon=self.epsilon)


def check_dial(option_name: str, shape: str, *, acceptance: float | None, epsilon: float | None) -> None:
    """Raises :class:`UserError` unless exactly one of the two dials is given."""
    if (acceptance is None) == (epsilon is None):
        raise UserError(f"--{option_name} {shape} takes either --acceptance or --epsilon: give one of them")
