"""CSV files of prompts: values keep what their text says, and damage is told with its row."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from specdist.data.formats.prompts import Prompts, RowError, open_prompts

TEXT = '''prompt,n,share,good,id,day,big,empty
"two
lines, and a ""quote""",1,0.5,true,007,2024-01-02,123456789012345678901,
12,,1e3,false,1,2024-01-03,1,
"",-3,2,,2,x,2,
,4,0.25,true,3,y,3,
'''


def opened(path: Path, content: str | bytes, prompt_column: str = "prompt") -> Prompts:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return open_prompts(str(path), prompt_column=prompt_column, messages_column=None, limit=None)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_column_has_a_type_only_where_that_loses_nothing(tmp_path: Path, name: str) -> None:
    """007 is not 7, a date is not a time, and a number of 21 digits is not a float."""
    prompts = opened(tmp_path / name, TEXT)
    types = {field.name: field.type for field in prompts.schema}
    text = pa.string()
    assert types == {
        "prompt": text, "n": pa.int64(), "share": pa.float64(), "good": pa.bool_(), "id": text, "day": text,
        "big": text, "empty": text,
    }  # fmt: skip
    rows = prompts.table(0, 4).to_pylist()
    assert [row["prompt"] for row in rows] == ['two\nlines, and a "quote"', "12", "", None]
    assert [row["n"] for row in rows] == [1, None, -3, 4]
    assert [row["share"] for row in rows] == [0.5, 1000.0, 2.0, 0.25]
    assert [row["good"] for row in rows] == [True, False, None, True]
    assert [row["id"] for row in rows] == ["007", "1", "2", "3"]
    for row, told in ((2, "prompt is empty"), (3, "prompt is null")):
        with pytest.raises(RowError, match=told):
            prompts.prompt(row)


def test_a_value_of_another_kind_far_down_makes_its_column_text(tmp_path: Path) -> None:
    """Whatever the beginning of the file looks like; and the prompt column is text in any case."""
    prompts = opened(tmp_path / "a.csv", "prompt,n\n" + "1,2\n" * 200_000 + "3,x\n")
    assert prompts.prompt(200_000) == "3" and prompts.value("n", 0) == "2"
