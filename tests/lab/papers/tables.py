"""A paper's table as repeated, and a claim of the paper with the number found for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdist.data.store.files import write_json
from specdist.utils.markdown import table


@dataclass(frozen=True)
class PaperTable:
    """``head`` and ``rows`` as text; ``about`` says what was counted, and how it differs from the paper."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    about: str

    def markdown(self) -> str:
        return f"### {self.title}\n\n{table(self.head, self.rows)}\n\n{self.about}"


@dataclass(frozen=True)
class Claim:
    """A paper's headline, what was found for it, and whether that agrees."""

    paper: str
    claim: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Repeated:
    """What was repeated of some papers. ``facts``: of the run, such as its date and command."""

    facts: dict[str, Any]
    tables: Sequence[PaperTable]
    claims: Sequence[Claim]

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @staticmethod
    def read(path: Path) -> Repeated:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Repeated(
            document["facts"],
            [PaperTable(**each) for each in document["tables"]],
            [Claim(**each) for each in document["claims"]],
        )

    def claims_markdown(self) -> str:
        rows = [[each.paper, each.claim, each.found, "yes" if each.holds else "no"] for each in self.claims]
        return table(["paper", "its claim", "found on this pair", "holds"], rows)

    def tables_markdown(self) -> str:
        facts = self.facts
        origin = f"{facts['date']}, target {facts['target']}, draft {facts['draft']}: `{facts['command']}`"
        return "\n\n".join([origin, *(each.markdown() for each in self.tables)])
