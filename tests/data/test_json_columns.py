"""Objects keep their own keys, in their order, and their own nulls: from every kind of file to the prompts,
the shards and the merged file, whatever other rows have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from specdist.data.formats import jsonl as jsonl_module
from specdist.data.formats.json_columns import values_of
from specdist.data.formats.prompts import Prompts, RowError, open_prompts
from specdist.data.run.merging import _write
from specdist.data.stats.rows import RowResult, shard_table


def call(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Weather?"}, call("weather", {"city": "Lyon"})],
    [{"role": "user", "content": "Convert", "mood": None}, call("convert", {"unit": "km", "amount": None})],
    [{"role": "user", "content": "None"}, call("none", {})],
    [{"role": "user", "content": "Other"}, call("convert", {"amount": 1.5, "unit": None, "more": [1, "a"]})],
    [{"role": "user", "content": "Again"}, call("convert", {"amount": 2, "unit": "é"})],
]
META: list[Any] = [{"x": 1}, {"y": [{"z": None}, {}]}, {}, None, {"x": 1.5, "a": "\n"}]
SAME: list[Any] = [
    {"a": [1], "b": None},
    None,
    {"a": [], "b": None},
    {"a": None, "b": None},
    {"a": [2], "b": "x"},
]
ROWS = [
    {"messages": chat, "meta": meta, "same": same, "scores": [1, 2.5], "tags": ["t"], "n": row}
    for row, (chat, meta, same) in enumerate(zip(CHATS, META, SAME, strict=True))
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, column: str = "messages") -> Prompts:
    return open_prompts(
        str(path), prompt_column=None, messages_column=column, limit=None, cache_dir=str(path.parent)
    )


@pytest.fixture(params=["small", "pieces"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are read in one piece, and in one of each row."""
    if request.param != "small":
        monkeypatch.setattr(jsonl_module, "CHUNK_BYTES", 1)


def shard_of(prompts: Prompts) -> pa.Table:
    results = [
        RowResult(row_id=row, sample_index=0, prompt="p", finish_reason="stop")
        for row in range(prompts.num_rows)
    ]
    return shard_table(prompts.table(0, prompts.num_rows), results, first_row=0, num_samples=1)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("order", [1, -1])
def test_objects_of_json_lines_are_those_of_the_file_at_every_station(tmp_path: Path, order: int) -> None:
    rows = ROWS[::order]
    prompts = opened(written(tmp_path / "a.jsonl", rows))
    # Compared as text: in Python 1 equals 1.0, and the order of keys does not count.
    assert json.dumps([prompts.prompt(row) for row in range(len(rows))]) == json.dumps(CHATS[::order])
    types = {field.name: str(field.type) for field in prompts.schema}
    assert types["messages"] == types["meta"] == "extension<arrow.json>"
    assert (types["same"], types["scores"], types["tags"], types["n"]) == (
        "struct<a: list<item: int64>, b: string>", "list<item: double>", "list<item: string>", "int64",
    )  # fmt: skip
    table = shard_of(prompts)
    path = tmp_path / "shard.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    read = datasets.load_dataset(
        "arrow", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    for name in ("messages", "meta", "same", "scores"):
        expected = json.dumps([row[name] for row in rows])
        assert json.dumps(values_of(table.column(name))) == expected.replace("[1, 2.5]", "[1.0, 2.5]")
        assert json.dumps([row[name] for row in read]) == expected.replace("[1, 2.5]", "[1.0, 2.5]")
    texts = pa.ipc.open_file(path).read_all().column("meta").to_pylist()
    assert [None if text is None else json.loads(text) for text in texts] == META[::order]


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize(
    ("values", "is_json"),
    [
        ([{"a": 1, "b": 2}, {"a": 3, "b": None}, None], False),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], True),
        ([{"a": 1}, {"a": 1.5}], True),
        ([{"a": "x"}, {"a": ["x"]}], True),
        ([{"a": None}, {}], True),
        ([[{"a": 1}], [{"a": 1, "b": None}]], True),
        (["x", {"a": 1}], True),
        ([{"a": 2**63}, {"a": 1}], True),
    ],
)
def test_a_column_is_json_where_a_struct_would_change_its_objects(
    tmp_path: Path, values: list[Any], is_json: bool
) -> None:
    """Keys, their order, and types, wherever in the file they differ."""
    for found in (values, values[::-1]):
        rows = [{"messages": CHATS[0], "value": value} for value in found]
        prompts = opened(written(tmp_path / "a.jsonl", rows))
        assert isinstance(prompts.schema.field("value").type, pa.JsonType) is is_json
        table = shard_of(prompts).column("value")
        assert json.dumps(values_of(table)) == json.dumps(found)


@pytest.mark.parametrize("suffix", [".arrow", ".parquet", ".jsonl"])
def test_merged_files_have_the_objects_of_the_input(tmp_path: Path, suffix: str) -> None:
    table = shard_of(opened(written(tmp_path / "a.jsonl", ROWS)))
    path = tmp_path / f"merged{suffix}"
    with path.open("wb") as file:
        _write(file, table.schema, iter([table]), suffix)
    expected = json.dumps(META)
    if suffix == ".jsonl":
        assert json.dumps([json.loads(line)["meta"] for line in path.read_text().splitlines()]) == expected
    else:
        read = pa.parquet.read_table(path) if suffix == ".parquet" else pa.ipc.open_file(path).read_all()
        assert json.dumps(values_of(read.column("meta"))) == expected


def test_a_null_in_a_struct_is_an_absent_key_but_for_the_content(tmp_path: Path) -> None:
    """A struct has every key of all rows, so that its nulls cannot be told from absent keys."""
    chats = [
        [{"role": "user", "content": "Weather?", "name": None}, call("weather", {"city": "Lyon"})],
        [{"role": "user", "content": "Convert", "name": "Ann"}, call("convert", {"amount": 5, "unit": "km"})],
    ]
    table = pa.table({"messages": chats, "rule": [{"regex": "a"}, {"choices": ["b"]}]})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    prompts = opened(path)
    first, second = prompts.prompt(0), prompts.prompt(1)
    assert first == [{"role": "user", "content": "Weather?"}, call("weather", {"city": "Lyon"})]
    assert second == [
        {"role": "user", "content": "Convert", "name": "Ann"}, call("convert", {"amount": 5, "unit": "km"})
    ]  # fmt: skip
    assert [prompts.value("rule", row) for row in (0, 1)] == [{"regex": "a"}, {"choices": ["b"]}]
    assert list(prompts.rows.values("rule")) == [{"regex": "a"}, {"choices": ["b"]}]
    # What is passed through has the file's type.
    assert shard_of(prompts).column("messages").type == table.column("messages").type


def test_a_value_of_a_json_column_that_cannot_be_used_costs_its_row_alone(tmp_path: Path) -> None:
    texts = ['"good"', "5", "{", None, '"\\ud800"', '""']
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts))
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(path, pa.schema([("prompt", pa.json_())])) as writer:
        writer.write_table(pa.table({"prompt": column}))
    prompts = open_prompts(str(path), prompt_column="prompt", messages_column=None, limit=None)
    assert prompts.prompt(0) == "good"
    for row, words in ((1, "is a number"), (2, "is not valid JSON"), (3, "is null"), (5, "is empty")):
        with pytest.raises(RowError, match=words):
            prompts.prompt(row)
