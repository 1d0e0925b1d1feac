"""Folders and files as datasets reads them: columns and keys in any order, splits by name, arrays of JSON."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from datasets.data_files import get_data_patterns

from specdist.data.formats.prompts import Prompts, open_prompts
from specdist.data.run.merging import MERGE_ERRORS, _write
from specdist.data.run.publishing import write_table
from specdist.data.stats.rows import RowResult, shard_table
from specdist.job.rows.output_columns import check_writable
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


@pytest.mark.parametrize(
    "names",
    [
        ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"],
        ["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"],
        ["x/dev.jsonl", "x/valid 1.jsonl", "x/val-b.jsonl"],
        ["x/latest.jsonl", "x/trainer.jsonl", "x/contest.jsonl", "x/evals.jsonl", "x/device.jsonl"],
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


def one(kind: pa.DataType, value: Any) -> pa.Array:
    return pa.array([value, None], kind)


KEYS = pa.map_(pa.string(), pa.int64())
DICTIONARY = pa.DictionaryArray.from_arrays
ARRAYS = {
    "text views": one(pa.string_view(), "a" * 40),
    "list views": one(pa.list_view(pa.int64()), [1, 2]),
    "runs": pa.RunEndEncodedArray.from_arrays([1, 2], ["a", "b"]),
    "unions": pa.UnionArray.from_sparse(
        pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]
    ),
    "nanoseconds": one(pa.time64("ns"), 2),
    "far dates": one(pa.timestamp("s"), 2**62),
    "intervals": one(pa.month_day_nano_interval(), (1, 2, 3)),
    "maps": one(KEYS, [("a", 1), ("b", 2)]),
    "keys twice": one(KEYS, [("a", 1), ("a", 2)]),
    "dictionaries": DICTIONARY(pa.array([0, 1]), pa.array(["a", "b"])),
    "nested dictionaries": one(pa.list_(pa.dictionary(pa.int32(), pa.string())), ["a"]),
    "dictionaries of lists": DICTIONARY(pa.array([0, 1]), pa.array([[1], [2]])),
    "dictionaries with null": DICTIONARY(pa.array([0, 1]), pa.array(["a", None])),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_column_of_any_type_is_written_as_it_is_or_refused_before(tmp_path: Path, name: str) -> None:
    """Found when a shard is written, a type that Arrow does not repeat or join costs a run of hours; and a
    merged file has every value, or is refused."""
    table = pa.table({"prompt": ["a", "b"], "x": ARRAYS[name]})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    prompts = opened(tmp_path)
    if name in ("dictionaries of lists", "dictionaries with null"):
        with pytest.raises(UserError, match=r"a\.arrow: column x has type dictionary<.*cannot hold .*plain"):
            check_writable(prompts)
        return
    check_writable(prompts)
    results = [RowResult(row_id=row, sample_index=sample, prompt=None, finish_reason="length")
               for row in range(2) for sample in range(2)]  # fmt: skip
    file = io.BytesIO()
    write_table(file, shard_table(prompts.table(0, 2), results, first_row=0, num_samples=2))
    written = pa.ipc.open_file(file.getvalue()).read_all()
    repeated = pa.concat_arrays([ARRAYS[name].slice(row, 1) for row in (0, 0, 1, 1)])
    assert written["x"].type == ARRAYS[name].type and str(written["x"].combine_chunks()) == str(repeated)
    merged = io.BytesIO()
    is_lost = name in ("keys twice", "far dates")
    try:
        _write(merged, written.schema, iter([written]), ".jsonl")
    except MERGE_ERRORS:
        assert is_lost
        return
    told = {"nanoseconds": "00:00:00.000000002", "text views": "a" * 40, "maps": '"b"'}.get(name, "")
    assert not is_lost and told in merged.getvalue().decode()
