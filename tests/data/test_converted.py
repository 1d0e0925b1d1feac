"""Large JSONL files, of which no rows are in memory: the same rows as of small ones, read once."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from specdist.data.formats import converted, csv_files, jsonl
from specdist.data.formats.prompts import Prompts, RowError, open_prompts
from specdist.utils.errors import UserError

ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "n": 1},
    {"prompt": 5, "n": 2, "late": None},
    {"prompt": "2020-01-01", "n": 2.5, "late": "x", "list": [1]},
    {"prompt": None, "n": None, "list": [0.5]},
    {"prompt": "e", "n": 7, "late": None, "list": None},
]


def opened(path: Path, cache_dir: Path) -> Prompts:
    return open_prompts(
        str(path), prompt_column="prompt", messages_column=None, limit=None, cache_dir=str(cache_dir)
    )


def written(path: Path, lines: list[bytes]) -> Path:
    content = b"\n".join(lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted, "LARGE_BYTES", 1)
    monkeypatch.setattr(converted, "LARGE_COMPRESSED_BYTES", 1)
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", 1)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_of_large_files_are_those_of_small_ones(
    tmp_path: Path, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / name, [*(json.dumps(row).encode() for row in ROWS), b'{"prompt": "\xff"}'])
    small = opened(path, tmp_path)
    expected, fingerprint = small.table(0, len(ROWS) + 1), small.fingerprint
    request.getfixturevalue("is_large")
    with monkeypatch.context() as patched:
        patched.setattr("specdist.data.store.files.sha256_of", None)  # read once, not twice
        large = opened(path, tmp_path)
        assert large.fingerprint == fingerprint
    check(large, expected)
    # Another start parses nothing.
    monkeypatch.setattr(jsonl, "json_chunks", None)
    again = opened(path, tmp_path)
    assert again.fingerprint == fingerprint
    check(again, expected)
    assert sorted(file.suffix for file in (tmp_path / "inputs").iterdir()) == [".arrow", ".json", ".lock"]


def check(prompts: Prompts, expected: pa.Table) -> None:
    found = prompts.table(0, prompts.num_rows)
    assert found.schema.equals(expected.schema) and found.schema.field("n").type == pa.float64()
    assert found.slice(0, len(ROWS)).equals(expected.slice(0, len(ROWS)))
    assert [prompts.prompt(row) for row in (0, 2, 4)] == ["a", "2020-01-01", "e"]
    for row, reason in ((1, "a number (5)"), (3, "is null"), (5, "not valid UTF-8")):
        with pytest.raises(RowError, match=reason.replace("(", r"\(").replace(")", r"\)")):
            prompts.prompt(row)


def test_a_changed_file_is_converted_anew_and_a_bad_line_is_told(is_large: None, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [b'{"prompt": "a"}'])
    first = opened(path, tmp_path).fingerprint
    written(path, [b'{"prompt": "b"}', b'{"prompt": "c"}'])
    changed = opened(path, tmp_path)
    assert changed.num_rows == 2 and changed.fingerprint != first
    # Size and time can stay, as those of a copy do.
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"c", b"d"))
    os.utime(path, ns=(0, before.st_mtime_ns))
    assert opened(path, tmp_path).prompt(1) == "d" and before.st_size == path.stat().st_size
    written(path, [b'{"prompt": "a"}', b"{}}"])
    with pytest.raises(UserError, match="line 2 is not valid JSON"):
        opened(path, tmp_path)
    assert not list((tmp_path / "inputs").glob("*.tmp"))
    assert len(list((tmp_path / "inputs").glob("*.arrow"))) == 2


CSV = b"""prompt,n,share,id,code,none,flag
"a
b",1,1,007,1,,true
,2,2,8,2,,false
2020-01-01,,2.5,9,3.5,,
"",4,1e3,10,x,,TRUE
\xff,5,,11,5,,true
"""
REQUESTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}]},
    {"messages": [{"role": "user", "content": "b"}], "temperature": 0.5, "stop": ["x"], "logprobs": True},
    {"messages": [], "seed": 3},
    {"messages": [{"role": "user", "content": "d"}], "seed": 4, "response_format": {"type": "json_object"}},
]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "requests.jsonl"])
def test_large_csv_files_and_batches_are_mapped_with_the_rows_of_small_ones(
    tmp_path: Path, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column's type, the options of all rows and why rows cannot be used are known at the end alone."""
    content = CSV
    if name == "requests.jsonl":
        about = {"method": "POST", "url": "/v1/chat/completions"}
        lines = [{"custom_id": str(index), **about, "body": body} for index, body in enumerate(REQUESTS)]
        content = "\n".join(map(json.dumps, lines)).encode()
    path = written(tmp_path / name, [content])
    column = "body" if name == "requests.jsonl" else "prompt"

    def seen() -> tuple[Any, ...]:
        prompts = open_prompts(
            str(path), prompt_column=column, messages_column=None, limit=None, cache_dir=str(tmp_path)
        )
        table = prompts.table(0, prompts.num_rows)
        told = [_prompt(prompts, row) for row in range(prompts.num_rows)]
        return table.schema, told, dict(prompts.unusable), prompts.is_chat, prompts.fingerprint, table

    small = seen()
    request.getfixturevalue("is_large")
    monkeypatch.setattr("specdist.data.formats.csv_files.BLOCK_BYTES", 96)
    with monkeypatch.context() as patched:
        patched.setattr("specdist.data.store.files.sha256_of", None)  # not read once more
        large = seen()
    monkeypatch.setattr(csv_files, "open_input", None)
    again = seen()
    assert large[:5] == again[:5] == small[:5]
    assert large[5].equals(small[5]) and again[5].equals(small[5])
    kinds = {field.name: str(field.type) for field in small[0]}
    if name == "requests.jsonl":
        assert list(small[2]) == [2] and kinds["constraint"] == "string"
        assert {item.name for item in small[0].field("options").type} == {"seed", "stop", "temperature"}
    else:
        assert [kinds[name] for name in ("n", "share", "id", "code", "none", "flag")] == [
            "int64", "double", "string", "string", "string", "bool",
        ]  # fmt: skip


def _prompt(prompts: Prompts, row: int) -> object:
    try:
        return prompts.prompt(row)
    except RowError as error:
        return error.reason


def test_a_column_that_a_large_csv_file_has_twice_is_refused(is_large: None, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", [b"prompt,prompt\na,b\n"])
    with pytest.raises(UserError, match="more than one column named prompt"):
        opened(path, tmp_path)
