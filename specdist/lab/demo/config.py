"""The options of ``jobs/train_demo.py``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.utils.rules import check_ranges


@dataclass(kw_only=True)
class PairConfig:
    """Every option of ``jobs/train_demo.py``. Raises :class:`UserError` for a value out of its range."""

    output: str = option(help="output folder for target/, draft/ and prompts.arrow")
    max_seconds: float = option(100.0, above=0, help="time limit of the training, in seconds")

    def __post_init__(self) -> None:
        check_ranges(self)
