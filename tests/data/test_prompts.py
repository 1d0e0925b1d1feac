from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from specdist.data.formats.prompts import open_prompts
from specdist.utils.errors import UserError

ROWS = [{"prompt": f"prompt {row}", "id": row} for row in range(10)]
TABLE = pa.Table.from_pylist(ROWS)


def open_(path, prompt_column="prompt", messages_column=None, limit=None):
    if messages_column is not None:
        prompt_column = None
    return open_prompts(str(path), prompt_column=prompt_column, messages_column=messages_column, limit=limit)


def write_arrow_file(path, table):
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_arrow_stream(path, table):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_jsonl(path, table):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()))


def write_gzip(path, table):
    path.write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode(), mtime=0)
    )


WRITERS = {
    "file.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
    "a.parquet": lambda path, table: pa.parquet.write_table(table, path),
    "a.jsonl": write_jsonl,
    "a.json": write_jsonl,
    "a.jsonl.gz": write_gzip,
}


@pytest.fixture(params=WRITERS)
def written(request, tmp_path):
    path = tmp_path / request.param
    WRITERS[request.param](path, TABLE)
    return path


def error_of(path, **options):
    with pytest.raises(UserError) as raised:
        open_(path, **options)
    return str(raised.value)


def test_every_file_type_gives_the_same_rows(written):
    prompts = open_(written)
    assert prompts.num_rows == 10
    assert prompts.schema.names == ["prompt", "id"]
    assert prompts.table(0, 10).to_pylist() == ROWS
    assert prompts.table(3, 5).to_pylist() == ROWS[3:5]
    assert [prompts.prompt(row) for row in range(10)] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize("suffix", [".arrow", ".json"])
def test_a_folder_is_read_in_the_order_of_file_names_and_other_files_are_ignored(tmp_path, suffix):
    write = next(writer for name, writer in WRITERS.items() if name.endswith(suffix))
    for name, rows in (("b", TABLE.slice(4)), ("a", TABLE.slice(0, 4))):
        write(tmp_path / f"{name}{suffix}", rows)
    (tmp_path / "README.md").write_text("# no data")
    if suffix != ".json":
        (tmp_path / "dataset_info.json").write_text("{}")
    assert open_(tmp_path).table(0, 10).to_pylist() == ROWS


def test_a_limit_takes_the_first_rows(written):
    assert open_(written, limit=3).num_rows == 3
    assert open_(written, limit=3).table(0, 3).to_pylist() == ROWS[:3]
    assert open_(written, limit=30).num_rows == 10


def test_the_fingerprint_depends_on_every_byte_and_not_on_the_path(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        for name in ("a", "b"):
            (folder / f"{name}.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    fingerprint = open_(first).fingerprint
    assert len(fingerprint) == 64
    assert open_(second, limit=1).fingerprint == fingerprint
    (second / "b.jsonl").write_text('{"prompt": "one"}\n{"prompt": "twO"}\n')
    assert open_(second).fingerprint != fingerprint
    # The same bytes, cut into files at another place.
    (second / "a.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "one"}\n')
    (second / "b.jsonl").write_text('{"prompt": "two"}\n')
    assert open_(second).fingerprint != fingerprint


@pytest.mark.parametrize("name", ["file.arrow", "stream.arrow", "a.parquet", "a.jsonl.gz"])
def test_a_truncated_file_is_refused(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path, TABLE)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7 if len(whole) > 300 else 1):
        path.write_bytes(whole[:size])
        message = error_of(path)
        assert str(path) in message, size
    path.write_bytes(whole[:-1])
    assert str(path) in error_of(path)
