"""What the comparison notices. The jobs themselves are for ``python -m tests.same_tokens``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.job.pair import write_arrow
from tests.same_tokens.comparing import first_difference

ROWS: dict[str, list[Any]] = {
    "row_id": [4, 5], "sample_index": [0, 1], "completion": ["a b", "c"], "completion_ids": [[7, 8], [9]],
    "finish_reason": ["stop", "length"], "num_drafts": [1, 2],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words", "of_tokens"),
    [
        ({}, None, None),
        ({"completion_ids": [[7, 8], [3]]}, *["row 5: completion_ids: [3], there [9]"] * 2),
        ({"num_drafts": [1, 3]}, "row 5: num_drafts: 3, there 2", None),
        ({"another": [1, 2]}, "row 4: another: 1, there None", None),
        ({name: values[:1] for name, values in ROWS.items()}, *["1 rows, there 2"] * 2),
        (None, *["files []"] * 2),
    ],
)
def test_the_first_difference_is_named(
    changes: dict[str, list[Any]] | None, words: str | None, of_tokens: str | None, tmp_path: Path
) -> None:
    """Also where nothing can be compared."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, rows in ((there, ROWS), (here, None if changes is None else ROWS | changes)):
        (folder / "shards").mkdir(parents=True)
        if rows is not None:
            write_arrow(folder / "shards" / "shard-00000.arrow", rows)
    for expected, alone in ((words, False), (of_tokens, True)):
        found = first_difference(there, here, of_tokens_alone=alone)
        assert (found is None) == (expected is None) and (expected or "") in (found or "")
