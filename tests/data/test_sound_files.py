"""Sound files of every format: all of their rows are prompts, and nothing is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict, Features, Json, Value

from specdist.data.formats.prompts import Chat
from tests.data.test_refusals import FIELDS, MESSAGES, PROMPT, ROW, ROWS, TURNS, opened, request, written

TEXTS = ["a", "b c", "é"]
BOM = b"\xef\xbb\xbf"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
ANSWERED = {"role": "tool", "tool_call_id": "1", "content": "5"}
NULLS = dict.fromkeys(["annotations", "audio", "function_call", "name", "refusal", "tool_calls"])
# Conversations in the forms of OpenAI's messages.
FORMS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER],
    "developer": [{"role": "developer", "content": "be brief"}, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "nulls": [USER | NULLS],
    "call": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, ANSWERED],
    "call without content": [USER, {"role": "assistant", "tool_calls": [CALL]}, ANSWERED],
    "function": [USER, {"role": "assistant", "content": None, "function_call": CALL["function"]}, USER],
    "reasoning": [USER, {"role": "assistant", "content": "b", "reasoning_content": "a"}, USER],
}
LISTS: dict[str, Callable[[pa.DataType], pa.DataType]] = {
    "list": pa.list_,
    "large": pa.large_list,
    "view": pa.list_view,
    "large view": pa.large_list_view,
    "fixed": lambda kind: pa.list_(kind, 1),
}


def as_json(values: list[Any]) -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(value) for value in values]))


def prompts_of(path: Path, **options: Any) -> list[Any]:
    """Of all rows, after everything that a run reads of its input."""
    prompts = opened(path, **options)
    assert prompts.table(0, prompts.num_rows).num_rows == prompts.num_rows
    return [prompts.prompt(row) for row in range(prompts.num_rows)]


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    return list(prompt.messages if isinstance(prompt, Chat) else prompt)


def test_text_in_every_layout(tmp_path: Path) -> None:
    """Arrow's layouts of text, in files, in streams, and in Parquet."""
    arrays = {
        "string": pa.array(TEXTS),
        "large": pa.array(TEXTS, pa.large_string()),
        "view": pa.array(TEXTS, pa.string_view()),
        "dictionary": pa.array(TEXTS).dictionary_encode(),
        "large dictionary": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
        "json": as_json(TEXTS),
    }
    for name, array in arrays.items():
        table = pa.table({"prompt": array})
        for file in ("{}.arrow", "stream {}.arrow", "{}.parquet"):
            assert prompts_of(written(tmp_path / file.format(name), table), **PROMPT) == TEXTS, name


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", ROWS), ("a.json.gz", ROWS),
        ("bom.jsonl", BOM + ROWS),
        ("crlf.jsonl", ROWS.replace(b"\n", b"\r\n")), ("blank.jsonl", b"\n\n" + ROWS + b" \n"),
        ("open.jsonl", ROWS[:-1]), ("keys.jsonl", ROW + b'{"prompt": "b", "x": {"a": 1}}\n'),
        ("own.jsonl", b'{"prompt": "a", "x": {"a": 1}}\n{"prompt": "b", "x": {"b": [1, "2", null]}}\n'),
        ("nan.jsonl", b'{"prompt": "a", "x": NaN}\n{"prompt": "b", "x": 1}\n'),
        ("empty.jsonl", b'{"prompt": "a", "x": {}}\n{"prompt": "b", "x": {}}\n'),
        ("a.csv.gz", FIELDS), ("bom.csv", BOM + FIELDS), ("open.csv", FIELDS[:-1]),
        ("crlf.csv", FIELDS.replace(b"\n", b"\r\n")), ("empty.csv", b'prompt,n\na,\nb,""\n'),
        ("quotes.csv", b'prompt\n"say ""a"""\n'),
    ],
)  # fmt: skip
def test_text_files(tmp_path: Path, name: str, content: bytes) -> None:
    """With a byte order mark, line ends of Windows, no last line end, objects with keys of their own."""
    found = prompts_of(written(tmp_path / name, content), **PROMPT)
    assert found == ['say "a"'] if name == "quotes.csv" else found[:1] == ["a"] and len(found) >= 2


def test_messages_in_every_layout(tmp_path: Path) -> None:
    """Lists of structs in Arrow's layouts; roles by a dictionary; whole conversations, messages or contents
    of JSON."""
    for name, of in LISTS.items():
        for kind in (pa.string(), pa.large_string(), pa.string_view()):
            message = pa.struct([("role", kind), ("content", kind), ("name", pa.string())])
            table = pa.table({"messages": pa.array([[USER]] * 2, of(message))})
            path = written(tmp_path / f"{name} {kind}.arrow", table)
            assert [messages_of(prompt) for prompt in prompts_of(path, **MESSAGES)] == [[USER]] * 2
        turns = pa.table({"turns": pa.array([["a"]], of(pa.string()))})
        assert prompts_of(written(tmp_path / f"{name}.arrow", turns), **TURNS) == [[USER | {"content": "a"}]]
    offsets = pa.array([0, 1], pa.int32())
    roles = pa.array(["user"]).dictionary_encode()
    for number, items in enumerate(
        [
            pa.StructArray.from_arrays([roles, pa.array(["hi"])], ["role", "content"]),
            pa.StructArray.from_arrays([pa.array(["user"]), as_json(["hi"])], ["role", "content"]),
            as_json([USER]),
        ]
    ):
        table = pa.table({"messages": pa.ListArray.from_arrays(offsets, items)})
        for file in (f"{number}.arrow", f"{number}.parquet"):
            assert prompts_of(written(tmp_path / file, table), **MESSAGES) == [[USER]]
    table = pa.table({"messages": as_json([[USER]])})
    assert prompts_of(written(tmp_path / "json.arrow", table), **MESSAGES) == [[USER]]


@pytest.mark.parametrize("form", FORMS)
def test_messages_in_every_form(tmp_path: Path, form: str) -> None:
    """In lines, in requests, and as datasets saves them: each has the roles and texts that it had."""
    messages = FORMS[form]
    line = json.dumps({"messages": messages}).encode() + b"\n"
    body = request(url="/v1/chat/completions", body={"messages": messages})
    found = [
        prompts_of(written(tmp_path / "a.jsonl", line), **MESSAGES),
        prompts_of(written(tmp_path / "requests.jsonl", body), prompt_column="body"),
    ]
    if form != "call without content":  # datasets cannot make a table of these
        rows = Dataset.from_list([{"messages": messages}])
        rows.save_to_disk(str(tmp_path / "saved"))
        rows.to_parquet(str(tmp_path / "rows.parquet"))
        rows.to_json(str(tmp_path / "rows.jsonl"))
        found += [prompts_of(tmp_path / name, **MESSAGES) for name in ("saved", "rows.parquet", "rows.jsonl")]
    for [prompt] in found:
        shown = [(message["role"], message.get("content")) for message in messages_of(prompt)]
        assert shown == [(message["role"], message.get("content")) for message in messages]


def test_folders_of_datasets(tmp_path: Path) -> None:
    """In several files, of selected rows, a split of several, and with a column of JSON."""
    rows = Dataset.from_dict({"prompt": list("abcdef")})
    rows.save_to_disk(str(tmp_path / "files"), num_shards=3)
    rows.select([4, 1]).save_to_disk(str(tmp_path / "selected"))
    DatasetDict(train=rows).save_to_disk(str(tmp_path / "splits"))
    features = Features({"prompt": Value("large_string"), "x": Json()})
    own = Dataset.from_dict({"prompt": ["a", "b"], "x": [{"a": 1}, {"b": "c"}]}, features=features)
    own.save_to_disk(str(tmp_path / "own"))
    own.to_parquet(str(tmp_path / "own.parquet"))
    rows.to_csv(str(tmp_path / "rows.csv"))
    for name, expected in {
        "files": "abcdef", "selected": "eb", "splits/train": "abcdef", "own": "ab", "own.parquet": "ab",
        "rows.csv": "abcdef",
    }.items():  # fmt: skip
        assert prompts_of(tmp_path / name, **PROMPT) == list(expected), name
