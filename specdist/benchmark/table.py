"""A table as text, on the console and in Markdown."""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is set flush left, the others flush right."""

    header: list[str]
    rows: list[list[str]]

    def console(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if index else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def markdown(self) -> str:
        rule = ["---", *(["---:"] * (len(self.header) - 1))]
        return "\n".join(f"| {' | '.join(line)} |" for line in [self.header, rule, *self.rows])


def decimals(value: float | None, digits: int = 2) -> str:
    """A number, or a dash for what was not measured."""
    return NOTHING if value is None else f"{value:.{digits}f}"
