"""The options of ``python -m tests.lab.papers``."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.utils.errors import UserError

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
        None, help=f"papers to repeat (default: all of {', '.join(TABLES)})", action="extend"
    )
    num_prompts: int = option(48, help="prompts of every set; a multiple of 6, the tasks of Spec-Bench")

    def __post_init__(self) -> None:
        for name in self.tables or ():
            if name not in TABLES:
                raise UserError(f"--tables {name} must be one of {', '.join(TABLES)}")
        if self.num_prompts < 6 or self.num_prompts % 6:
            raise UserError(f"--num_prompts {self.num_prompts} must be a positive multiple of 6")
