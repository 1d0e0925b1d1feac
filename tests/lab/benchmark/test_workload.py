"""Choosing rows by group: equally many of each, spread over the group, and only rows that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdist.lab.benchmark.methods import Row
from specdist.lab.synthetic.config import MAX_POSITIONS
from specdist.utils.errors import UserError
from tests.lab.benchmark.config import ComparisonConfig
from tests.lab.benchmark.setting import EVERYTHING, ComparedSetting, make_workload

# The tokenizer of a random pair has a token per byte.
TOO_LONG = "x" * (MAX_POSITIONS + 1)


def workload(
    setting: ComparedSetting, tmp_path: Path, rows: list[dict[str, Any]], **options: Any
) -> dict[str, list[Row]]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ComparisonConfig(
        **{
            "output": "unused",
            "target": str(setting.pair.target_checkpoint.folder),
            "draft": str(setting.pair.draft_checkpoint.folder),
            "prompts": str(path),
            "group_column": "task",
            "max_new_tokens": 8,
            **options,
        }
    )
    return make_workload(config, setting.pair)


def rows_of(task: str, prompts: list[str]) -> list[dict[str, Any]]:
    return [{"task": task, "prompt": prompt} for prompt in prompts]


def texts(setting: ComparedSetting, rows: list[Row]) -> list[str]:
    return [setting.pair.tokenizer.decode(row.prompt_ids) for row in rows]


def test_equally_many_rows_are_taken_from_every_group_spread_over_it(
    setting: ComparedSetting, tmp_path: Path
) -> None:
    long, short = rows_of("long", list("abcdefgh")), rows_of("short", ["z"])
    found = workload(setting, tmp_path, [*long[:4], *short, *long[4:]], num_prompts=5)
    assert {name: texts(setting, rows) for name, rows in found.items()} == {
        "long": ["a", "e"],
        "short": ["z"],
    }


def test_a_row_that_does_not_fit_is_replaced_by_the_next(setting: ComparedSetting, tmp_path: Path) -> None:
    found = workload(setting, tmp_path, rows_of("t", [TOO_LONG, "b", "", "d"]), num_prompts=2)
    assert texts(setting, found["t"]) == ["b", "d"]
    fits = "y" * (MAX_POSITIONS - 8)
    found = workload(setting, tmp_path, rows_of("t", [fits + "y", fits]), num_prompts=1)
    assert texts(setting, found["t"]) == [fits]


def test_without_groups_the_first_rows_are_taken_or_all(setting: ComparedSetting, tmp_path: Path) -> None:
    found = workload(setting, tmp_path, rows_of("t", list("abc")), num_prompts=2, group_column=None)
    assert {name: texts(setting, rows) for name, rows in found.items()} == {EVERYTHING: ["a", "b"]}
    with pytest.raises(UserError, match=r"row 1: prompt is empty; leave the row out"):
        workload(setting, tmp_path, rows_of("t", ["a", ""]), group_column=None)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            rows_of("a", ["p"]) + rows_of("b", ["p"]),
            {"num_prompts": 1},
            r"less than one row for each .* 2 groups",
        ),
        (
            rows_of("a", ["p"]),
            {"group_column": "kind"},
            r"--group_column kind is not a column of --prompts .*task",
        ),
        ([{"task": None, "prompt": "p"}], {}, "--group_column task is null in row 0"),
        (rows_of("a", ["p"]) + rows_of("b", [TOO_LONG]), {}, "no row of the group b can be used"),
    ],
)
def test_what_cannot_be_grouped_is_refused(
    setting: ComparedSetting,
    tmp_path: Path,
    rows: list[dict[str, Any]],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(UserError, match=message):
        workload(setting, tmp_path, rows, **options)
