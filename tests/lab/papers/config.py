"""The options of ``python -m tests.lab.papers``."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.utils.rules import Rule, check_ranges

TABLES = ("leviathan", "svip", "gammatune", "specdecpp", "sprinter")


@dataclass(kw_only=True)
class PapersConfig:
    """Every option of ``python -m tests.lab.papers``. Raises :class:`UserError` for a value out of its
    range."""

    target: str = option(help="hub id or folder of the large model")
    draft: str = option(help="hub id or folder of the small model")
    prompts: str = option(
        help="folder with spec_bench, mt_bench, alpaca_test, humaneval, gsm8k_test and dolly_passage (.arrow)"
    )
    work: str = option(help="folder of traces, heads and runs, as jobs/benchmarks/papers.sh makes it")
    output: str = option(help="result file (.json)")
    tables: list[str] | None = option(
        None, action="extend", rule=Rule(TABLES.__contains__, f"must be one of {', '.join(TABLES)}"),
        help=f"papers to repeat (default: all of {', '.join(TABLES)})",
    )  # fmt: skip
    num_prompts: int = option(
        48, rule=Rule(lambda n: n >= 6 and n % 6 == 0, "must be a positive multiple of 6"),
        help="prompts of every set; a multiple of 6, the tasks of Spec-Bench",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_ranges(self)
