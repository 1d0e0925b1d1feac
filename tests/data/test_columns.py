"""Folders and files as datasets reads them: columns and keys in any order, splits by name, arrays of JSON."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from datasets.data_files import get_data_patterns

from specdist.data.formats.prompts import Prompts, open_prompts
from specdist.utils.errors import UserError

TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
TURNED = pa.struct([("content", pa.string()), ("role", pa.string())])
HI = [{"role": "user", "content": "Hi"}]
WRITERS: dict[str, Any] = {
    "parquet": pa.parquet.write_table,
    "arrow": partial(pyarrow.feather.write_feather, compression="uncompressed"),
    "csv": pa.csv.write_csv,
}


def opened(path: Path) -> Prompts:
    return open_prompts(str(path), prompt_column="prompt", messages_column=None, limit=None)


@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_and_keys_may_be_in_another_order(tmp_path: Path, suffix: str) -> None:
    """Such files were refused, by a message that named no difference. Whether nulls are allowed is none."""
    first = {"prompt": pa.array(["a", "b"]), "n": pa.array([1, 2])}
    second = {"n": pa.array([3]), "prompt": pa.array(["c"])}
    if suffix != "csv":
        first["chat"], second["chat"] = pa.array([HI, None], pa.list_(TURN)), pa.array([HI], pa.list_(TURNED))
    for number, columns in enumerate((first, second)):
        table = pa.table(columns)
        place = table.column_names.index("n")
        schema = table.schema.set(place, pa.field("n", pa.int64(), nullable=number > 0))
        WRITERS[suffix](table.cast(schema), tmp_path / f"{number}.{suffix}")
    prompts = opened(tmp_path)
    rows = prompts.table(0, 3).to_pylist()
    assert [(row["prompt"], row["n"]) for row in rows] == [("a", 1), ("b", 2), ("c", 3)]
    assert [prompts.value("prompt", row) for row in range(3)] == ["a", "b", "c"]
    assert suffix == "csv" or [row["chat"] for row in rows] == [HI, None, HI]


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """A Parquet file with such columns ended in a traceback."""
    table = pa.table([["a"], [1], [2]], names=["prompt", "x", "x"])
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="more than one column named x: rename"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"],
        ["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"],
        ["data/en-00000-of-00001.jsonl", "data/de-00000-of-00001.jsonl"],
        ["x/en-00000-of-00001.jsonl", "x/de-00000-of-00001.jsonl"],
        ["x/train.jsonl", "x/my_eval.2.jsonl"],
        ["x/dev.jsonl", "x/valid 1.jsonl", "x/val-b.jsonl"],
        ["x/latest.jsonl", "x/trainer.jsonl", "x/contest.jsonl", "x/evals.jsonl", "x/device.jsonl"],
        ["x/training.jsonl", "x/latest.jsonl"],
    ],
)
def test_files_of_several_splits_are_refused_where_datasets_finds_several(
    tmp_path: Path, names: list[str]
) -> None:
    """Read as one, an evaluation would run over the training set, without a word."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "a"}\n')
    folder = (tmp_path / names[0]).parent
    splits = get_data_patterns(str(tmp_path if folder.name == "data" else folder))
    if len(splits) == 1:
        assert opened(folder).num_rows == len(names)
        return
    with pytest.raises(UserError, match="has files of several splits") as error:
        opened(folder)
    assert all(str(split) in str(error.value) for split in splits)


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_objects_is_read(tmp_path: Path, indent: int | None) -> None:
    """The form of Alpaca's files: refused as bad JSON, which it is not."""
    rows = [{"prompt": f"p{row}", "meta": {"k": row}} for row in range(4)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, indent=indent))
    expected = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "c"))["train"]
    assert opened(path).table(0, 4).to_pylist() == expected.to_list() == rows
