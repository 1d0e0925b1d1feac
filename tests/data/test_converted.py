"""Large JSONL files, of which no rows are in memory: the same rows as of small ones, read once."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "requests.jsonl"])
def test_large_files_are_mapped_with_the_rows_of_small_ones(
    tmp_path: Path, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column's type, the options of all rows and why rows cannot be used are known at the end alone."""
    lines, column = [CSV], "prompt"
    if name == "requests.jsonl":
        about, column = {"method": "POST", "url": "/v1/chat/completions"}, "body"
        rows = [{"custom_id": str(index), **about, "body": body} for index, body in enumerate(REQUESTS)]
        lines = [json.dumps(row).encode() for row in rows]
    elif "jsonl" in name:
        lines = [*(json.dumps(row).encode() for row in ROWS), b'{"prompt": "\xff"}']
    path = written(tmp_path / name, lines)

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
    # Another start parses nothing.
    monkeypatch.setattr(csv_files, "open_input", None)
    monkeypatch.setattr(jsonl, "json_chunks", None)
    again = seen()
    assert large[:5] == again[:5] == small[:5]
    assert again[5].equals(large[5]) and large[5].slice(0, 5).equals(small[5].slice(0, 5))
    assert sorted(file.suffix for file in (tmp_path / "inputs").iterdir()) == [".arrow", ".json", ".lock"]
    kinds = {field.name: str(field.type) for field in small[0]}
    if name == "requests.jsonl":
        assert list(small[2]) == [2] and kinds["constraint"] == "string"
        assert {item.name for item in small[0].field("options").type} == {"seed", "stop", "temperature"}
    elif "jsonl" in name:
        assert (kinds["n"], kinds["late"], kinds["list"]) == ("double", "string", "list<item: double>")
        reasons = ("a number (5)", "is null", "not valid UTF-8")
        assert all(reason in small[1][row] for row, reason in zip((1, 3, 5), reasons, strict=True))
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
