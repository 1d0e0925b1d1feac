"""The options of ``jobs/make_synthetic.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from specdist.config.arguments import option
from specdist.lab.synthetic.shapes import SHAPES
from specdist.utils.errors import UserError


@dataclass(kw_only=True)
class SyntheticConfig:
    """Every option of the job. Raises :class:`UserError` for a value out of its range."""

    output: str = option(help="folder that gets target/, draft/ and synthetic.json")
    shape: str = option(help=f"one of {', '.join(SHAPES)}")
    acceptance: float | None = option(None, help="wanted greedy acceptance; the target is loaded to find it")
    epsilon: float | None = option(None, help="weight of the later layers instead; needs one layer's memory")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", help="of the stored weights")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="where --acceptance runs the target")
    seed: int = option(0, help="seed of the weights")

    def __post_init__(self) -> None:
        check_dial("shape", self.shape, acceptance=self.acceptance, epsilon=self.epsilon)
        if not 0 <= self.seed < 2**31:
            raise UserError(f"--seed {self.seed} must be in [0, 2**31)")


def check_dial(option_name: str, shape: str, *, acceptance: float | None, epsilon: float | None) -> None:
    """Raises :class:`UserError` for an unknown shape, or unless exactly one of the two dials is given."""
    if shape not in SHAPES:
        raise UserError(f"--{option_name} {shape!r} is not a shape: choose one of {', '.join(SHAPES)}")
    if (acceptance is None) == (epsilon is None):
        raise UserError(f"--{option_name} {shape} takes either --acceptance or --epsilon: give one of them")
    if acceptance is not None and not 0 < acceptance <= 1:
        raise UserError(f"--acceptance {acceptance} must be in (0, 1]")
    if epsilon is not None and not 0 <= epsilon < math.inf:
        raise UserError(f"--epsilon {epsilon} must be 0 or above")
