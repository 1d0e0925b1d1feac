"""A table as text: on the console, and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """Cells as text. The first ``num_names`` columns are set flush left, the others flush right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int = 1

    @staticmethod
    def of(rows: Sequence[Mapping[str, str | int | None]], *, num_names: int = 1) -> Table:
        """Make a table from rows that map the same headings to their cells, in order. None becomes a dash."""
        header = list(rows[0]) if rows else []
        cells = [[NOTHING if row[name] is None else str(row[name]) for name in header] for row in rows]
        return Table(header, cells, num_names)

    def console(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if index < self.num_names else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def markdown(self) -> str:
        """The cells must be Markdown already."""
        names = min(self.num_names, len(self.header))
        rule = ["---"] * names + ["---:"] * (len(self.header) - names)
        return "\n".join(f"| {' | '.join(line)} |" for line in [self.header, rule, *self.rows])


def decimals(value: float | None, digits: int = 2) -> str | None:
    """A number with so many digits after the point; None stays None, which a table shows as a dash."""
    return None if value is None else f"{value:.{digits}f}"
