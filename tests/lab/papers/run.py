"""``python -m tests.lab.papers`` from its options to its result file."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path

from tests.lab.papers import gammatune, leviathan, specdecpp, sprinter, svip
from tests.lab.papers.config import TABLES, PapersConfig
from tests.lab.papers.tables import Claim, PaperTable, Repeated
from tests.lab.papers.traces import Traces

REPEATED: dict[str, Callable[[Traces], tuple[list[PaperTable], list[Claim]]]] = {
    "leviathan": leviathan.tables,
    "svip": svip.tables,
    "gammatune": gammatune.tables,
    "specdecpp": specdecpp.tables,
    "sprinter": sprinter.tables,
}


def run_papers(config: PapersConfig) -> Repeated:
    """Repeats the papers and writes the result file. Raises :class:`UserError` for what is missing."""
    traces = Traces(config)
    tables: list[PaperTable] = []
    claims: list[Claim] = []
    for name in config.tables or TABLES:
        found, said = REPEATED[name](traces)
        tables += found
        claims += said
    facts = {
        "date": datetime.date.today().isoformat(),
        "target": config.target,
        "draft": config.draft,
        "num_prompts": config.num_prompts,
        "command": " ".join(["python", *sys.argv]),
    }
    repeated = Repeated(facts, tables, claims)
    repeated.write(Path(config.output))
    return repeated
