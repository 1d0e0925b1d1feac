"""Every column and statistic of a run is described, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specdist.cli import show
from specdist.data.stats.schema import SECTIONS, fields_table
from specdist.data.stats.shard import Stats


def dotted(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of a JSON document's values."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_statistic_is_described() -> None:
    """In the order of the file, with the fields of its parts."""
    names = [field.name for field in SECTIONS["statistics"][1]()]
    assert names == ["exact", "replica", *dotted(Stats().to_json())]


def test_every_total_is_described() -> None:
    written = ["output", "exact", "complete", *Stats().summary()]
    assert [field.name for field in SECTIONS["totals"][1]()] == written


@pytest.mark.parametrize("section", SECTIONS)
def test_every_description_is_one_line_of_prose(section: str) -> None:
    heading, fields = SECTIONS[section]
    for field in fields():
        assert len(field.meaning) > 5 and field.meaning == field.meaning.strip() and "\n" not in field.meaning
    rows = fields_table(heading, fields()).splitlines()
    assert len(rows) == 2 + len(fields()) and {row.count(" | ") for row in rows if "---" not in row} == {2}


def test_the_command_prints_every_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(["--schema"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {field.name} (" in text for _, fields in SECTIONS.values() for field in fields())
    assert show([]) == 2 and "--schema" in capsys.readouterr().err
