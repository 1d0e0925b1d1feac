"""What the comparison notices. The jobs themselves are for ``python -m tests.same_tokens``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.job.pair import write_arrow
from tests.same_tokens.cases import CASES
from tests.same_tokens.comparing import first_difference

ROWS: dict[str, list[Any]] = {
    "row_id": [4, 5], "sample_index": [0, 1], "completion": ["a b", "c"], "completion_ids": [[7, 8], [9]],
    "finish_reason": ["stop", "length"], "num_drafts": [1, 2],
}  # fmt: skip


def run_of(folder: Path, **changes: list[Any]) -> Path:
    (folder / "shards").mkdir(parents=True)
    write_arrow(folder / "shards" / "shard-00000.arrow", ROWS | changes)
    return folder


@pytest.mark.parametrize(
    ("changes", "words", "of_tokens"),
    [
        ({}, None, None),
        ({"completion_ids": [[7, 8], [3]]}, *["row 5/1, completion_ids[0]: [3], there [9]"] * 2),
        ({"completion_ids": [[7], [9]]}, *["row 4/0, completion_ids[1]: [], there [8]"] * 2),
        ({"completion": ["a c", "c"]}, *["row 4/0, completion: 'a c', there 'a b'"] * 2),
        ({"num_drafts": [1, 3]}, "row 5/1, num_drafts: 3, there 2", None),
        ({"num_drafts": [1.0, 2.0]}, "row 4/0, num_drafts: 1.0, there 1", None),
    ],
)
def test_the_first_difference_is_named(
    changes: dict[str, list[Any]], words: str | None, of_tokens: str | None, tmp_path: Path
) -> None:
    there, here = run_of(tmp_path / "there"), run_of(tmp_path / "here", **changes)
    assert first_difference(there, here) == words
    assert first_difference(there, here, of_tokens_alone=True) == of_tokens


def test_missing_files_rows_and_columns_are_differences(tmp_path: Path) -> None:
    there = run_of(tmp_path / "there")
    (tmp_path / "none").mkdir()
    assert "files []" in (first_difference(there, tmp_path / "none") or "")
    assert "files []" in (first_difference(tmp_path / "none", tmp_path / "none") or ""), (
        "nothing was compared"
    )
    more = run_of(tmp_path / "more", another=[1, 2])
    assert "'another'" in (first_difference(there, more) or "")
    fewer = run_of(tmp_path / "fewer", **{name: values[:1] for name, values in ROWS.items()})
    assert "1 rows" in (first_difference(there, fewer, of_tokens_alone=True) or "")


def test_cases_have_names_of_their_own_and_whole_arguments() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert not any("models}" in " ".join(case.arguments("/models")) for case in CASES)
