"""Every refusal of prompts, each by a file that has the fault; and none of sound files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from specdist.data.formats.prompts import Prompts, open_prompts
from specdist.utils.errors import UserError
from tests.refusals import places, recorded

MODULES = [f"data/formats/{name}.py" for name in ("batches", "csv_files", "inputs", "jsonl", "prompts")]
MODULES += [f"data/formats/{name}.py" for name in ("columns", "json_columns", "messages", "streams")]
ROW = b'{"prompt": "a"}\n'
ROWS = b'{"prompt": "a", "n": 1}\n{"prompt": "b", "n": 2.5}\n'
FIELDS = b'prompt,n\na,1\n"b, c",2\n"d\ne",3\n'
PROMPT, MESSAGES = {"prompt_column": "prompt"}, {"messages_column": "messages"}
TURNS = {"messages_column": "turns", "has_turns": True}
TWICE = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])
BAD_TEXT = pa.array([b"\xff"]).view(pa.string())
BAD_JSON = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{"]))

Then = Callable[[Prompts], Any]


def opened(path: Path | str, *, limit: int | None = None, **options: Any) -> Prompts:
    return open_prompts(
        str(path), **{"prompt_column": None, "messages_column": None, "limit": limit} | options
    )


def written(path: Path, content: bytes | pa.Table) -> Path:
    if isinstance(content, bytes):
        path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    elif path.suffix == ".parquet":
        pa.parquet.write_table(content, path, row_group_size=2)
    else:
        new = pa.ipc.new_stream if path.name.startswith("stream") else pa.ipc.new_file
        with new(str(path), content.schema) as writer:
            writer.write_table(content)
    return path


def texts(*values: str) -> pa.Table:
    return pa.table({"prompt": list(values)})


def request(custom_id: Any = "1", url: str = "/v1/completions", body: Any = None) -> bytes:
    row = {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": "a"}}
    return json.dumps(row).encode() + b"\n"


# The files of a folder, or one file; options; what the message says.
Fault = tuple[dict[str, bytes | pa.Table], dict[str, Any], Sequence[str]]
FAULTS: list[Fault] = [
    ({"a.txt": b"a"}, PROMPT, ["a.txt has an unknown file type", ".jsonl"]),
    ({}, PROMPT, ["contains no file that ends in", "folders in it are not searched"]),
    ({"a.csv": FIELDS, "b.jsonl": ROW}, PROMPT, ["mixes types of files (1 CSV, 1 JSONL)", "one type"]),
    ({"a.jsonl": b""}, PROMPT, ["a.jsonl has no rows"]),
    ({"a.csv": b"prompt,n\n"}, PROMPT, ["a.csv has no rows"]),
    ({"dataset_dict.json": b"{}", "train/a.jsonl": ROW}, PROMPT, ["is a DatasetDict", "splits (train)"]),
    ({"state.json": b"{", "a.arrow": texts("a")}, PROMPT, ["state.json is not one", "again"]),
    ({"state.json": b"{}", "a.arrow": texts("a")}, PROMPT, ["state.json is not one", "_data_files"]),
    ({"state.json": b'{"_data_files": []}', "a.arrow": texts("a")}, PROMPT, ["names no data files"]),
    ({"state.json": b'{"_data_files": [{"filename": "b.arrow"}]}', "a.arrow": texts("a")}, PROMPT,
     ["b.arrow, named in state.json, is missing", "copy the whole folder"]),
    ({"state.json": b'{"_data_files": [], "_indices_files": ["x"]}', "a.arrow": texts("a")}, PROMPT,
     ["indices file", "flatten_indices()"]),
    ({"a.arrow": texts("a"), "b.arrow": pa.table({"prompt": [1]})}, PROMPT,
     ["b.arrow has prompt (int64), but", "a.arrow has prompt (string)", "same columns and types"]),
    ({"train-0.jsonl": ROW, "a_test.jsonl": ROW}, PROMPT, ["several splits (test, train)"]),
    ({"a.arrow": pa.table({"prompt": ["a"], "s": TWICE})}, PROMPT,
     ["more than one column named s.x: rename"]),
    ({"a.parquet": b"PAR1"}, PROMPT, ["a.parquet is not a complete Parquet file", "of another type"]),
    ({"a.arrow": b""}, PROMPT, ["a.arrow is not a complete Arrow file", "end-of-stream"]),
    # Lines of JSON.
    ({"a.jsonl": b'[1]\n[2]'}, PROMPT, ["line 1 is a list (", "one JSON object per line"]),
    ({"a.json": b'[{"prompt": "a"},\n2]'}, PROMPT, ["row 1 is a number (2)", "or an array of objects"]),
    ({"a.json": b'\n[{"prompt": "a"},\n]'}, PROMPT, ["line 3 is not valid JSON", "at character 0"]),
    ({"a.json": b'{\n"data": []}'}, PROMPT, ["is one JSON object over", "keys data", "per line"]),
    ({"a.json": b'{"data"\n'}, PROMPT, ["line 1 is not valid JSON", "at character 7", "per line"]),
    ({"a.jsonl": ROW + b"null\n"}, PROMPT, ["line 2 is null, not an object"]),
    ({"a.jsonl": ROW + b'{"x": ' + b"[" * 9999 + b"]" * 9999 + b"}"}, PROMPT,
     ["line 2 has lists", "as text"]),
    ({"a.jsonl": ROW + b'{"prompt": 1, "x": 1}\n{"prompt": "a", "x": "s"}\n'}, PROMPT,
     ["line 3 cannot be kept as it is: column x", "'s'", "one type in all rows"]),
    ({"a.jsonl": b'{"prompt": "a", "x": 18446744073709551615}\n'}, PROMPT,
     ["line 1 cannot be kept as it is: column x", "64 bits", "write the values as text"]),
    ({"a.jsonl": ROW + b'{"prompt": "\xe9"}\n'}, PROMPT, ["line 2 is not valid JSON: 'utf-8'", "in UTF-8"]),
    ({"a.jsonl": ROW + b'{"prompt": "\\ud83d"}\n'}, PROMPT,
     ["line 2 cannot be kept as it is: column prompt", "halves of characters"]),
    ({"a.arrow": pa.table({"prompt": BAD_TEXT})}, PROMPT,
     ["a.arrow is not a complete Arrow file", "UTF8"]),
    ({"a.parquet": pa.table({"prompt": BAD_TEXT})}, PROMPT,
     ["a.parquet is not a complete Parquet file", "UTF8"]),
    ({"a.jsonl": ROW, "b.jsonl": ROWS}, PROMPT, ["b.jsonl has the columns n, prompt, but", "same columns"]),
    ({"a.jsonl": b'{"prompt": ["a"]}\n'}, PROMPT,
     ["--prompt_column prompt has no usable prompt", "row 0, prompt is a list", "--messages_column"]),
    ({"a.jsonl": b'{"messages": "a"}\n'}, MESSAGES,
     ["--messages_column messages has no usable prompt", "row 0, messages is text ('a')", "--prompt_column"]),
    ({"a.jsonl": b'{"turns": "a"}\n'}, TURNS, ["--turns_column turns has no usable prompt", "is text ('a')"]),
    # Compressed files.
    ({"a.jsonl.gz": b"cut"}, PROMPT, ["a.jsonl.gz cannot be decompressed", "end-of-stream", "copy it again"]),
    ({"a.csv.gz": b"cut"}, PROMPT, ["a.csv.gz cannot be decompressed", "end-of-stream", "copy it again"]),
    # CSV.
    ({"a.csv": b""}, PROMPT, ["a.csv cannot be read as CSV: Empty CSV file"]),
    ({"a.csv": b'prompt,n\n"a,1\n'}, PROMPT, ["a.csv cannot be read as CSV: a double quote is not closed"]),
    ({"a.csv": b"prompt,n\na,1\nb\n"}, PROMPT, ["cannot be read as CSV: row 1: Expected 2 columns, got 1",
                                               "as many fields as the header"]),
    ({"a.csv": b"prompt,n\na,1\n\xff,2\n"}, PROMPT, ["cannot be read as CSV", "invalid UTF8"]),
    ({"a.csv": b"prompt,n\xe9\na,1\n"}, PROMPT, ["cannot be read as CSV: 'utf-8'", "the text is UTF-8"]),
    ({"a.csv": b"prompt\na\n", "b.csv": FIELDS}, PROMPT,
     ["b.csv has n (string), but", "a.csv has no column n", "same columns"]),
    ({"a.csv": b"prompt,prompt\na,b\n"}, PROMPT, ["more than one column named prompt", "rename"]),
    # Columns.
    ({"a.csv": FIELDS}, {"prompt_column": "text"},
     ["--prompt_column text is not a column", "which has prompt (string), n (int64)", "--turns_column"]),
    ({"a.csv": FIELDS}, TURNS, ["--turns_column turns is not a column", "--prompt_column (text)"]),
    ({"a.jsonl": b'{"prompt": null}\n'}, PROMPT, ["--prompt_column prompt is null in every row"]),
    ({"a.arrow": pa.table({"prompt": [1]})}, PROMPT,
     ["--prompt_column prompt has type int64", "must be text"]),
    ({"a.arrow": pa.table({"turns": ["a"]})}, TURNS,
     ["--turns_column turns has type string", "list of texts"]),
    ({"a.arrow": pa.table({"messages": [[{"from": "human", "value": "a"}]]})}, MESSAGES,
     ["--messages_column messages has type list<", "structs with the strings role and content"]),
    ({"a.arrow": pa.table({"prompt": ["a"], "completion": ["b"]})}, PROMPT,
     ["names that the output reserves: completion", "rename"]),
    # Requests.
    ({"a.jsonl": request() + b"{}\n"}, {"prompt_column": "body"},
     ["line 2 is not a request of a batch", "custom_id (text)"]),
    ({"a.jsonl": request() + request()}, {"prompt_column": "body"},
     ["line 2 has the custom_id '1'", "another"]),
    ({"a.jsonl": request(url="/v1/embeddings")}, {"prompt_column": "body"},
     ["line 1 asks for POST /v1/embeddings", "must be POST /v1/chat/completions"]),
    ({"a.jsonl": request() + request("2", "/v1/chat/completions")}, {"prompt_column": "body"},
     ["line 2 has url '/v1/chat/completions'", "line 1 has '/v1/completions'", "split the file"]),
]  # fmt: skip
# What is asked of sound prompts.
QUESTIONS: list[tuple[dict[str, bytes | pa.Table], dict[str, Any], Then, Sequence[str]]] = [
    ({"a.csv": FIELDS}, PROMPT, lambda prompts: prompts.check_column("--row_options", "seed"),
     ["--row_options seed is not a column", "prompt (string), n (int64)"]),
    ({"a.arrow": pa.table({"prompt": ["a"], "g": BAD_JSON})},
     PROMPT, lambda prompts: list(prompts.values("--row_options", "g")),
     ["--row_options g: row 0 cannot be read (g is not valid JSON"]),
    ({"a.jsonl": request()}, {"prompt_column": "body"}, lambda prompts: prompts.check_no_batch("this job"),
     ["a.jsonl holds requests of OpenAI's batch format", "--prompt_column"]),
]  # fmt: skip


def _refused(
    folder: Path, files: dict[str, bytes | pa.Table], options: dict[str, Any], then: Then | None = None
) -> str:
    """The message. One file is opened as such unless it is a part of a folder."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if content == b"cut":
            (folder / name).write_bytes(gzip.compress(ROWS * 99)[:-9])
        else:
            written(folder / name, content)
    path = folder / next(iter(files)) if len(files) == 1 else folder
    with pytest.raises(UserError) as raised:
        prompts = opened(path, **options)
        assert then is not None, f"{files} was opened"
        then(prompts)
    return str(raised.value)


def test_every_refusal_of_prompts_is_true_of_a_file(tmp_path: Path) -> None:
    """Each place in the code that refuses prompts has a file here that has the fault."""
    with recorded() as made:
        for number, (files, options, words) in enumerate(FAULTS):
            message = _refused(tmp_path / f"fault-{number}", files, options)
            assert all(word in message for word in words), message
        for number, (files, options, then, words) in enumerate(QUESTIONS):
            message = _refused(tmp_path / f"question-{number}", files, options, then)
            assert all(word in message for word in words), message
        for path, words in (
            (tmp_path / "none.csv", ["none.csv: no such file or folder", "spelling"]),
            (tmp_path / f"{'x' * 300}.csv", ["cannot be read", "too long"]),
        ):
            with pytest.raises(UserError) as raised:
                opened(path, **PROMPT)
            assert all(word in str(raised.value) for word in words), raised.value
        # A file whose every read fails, as on a broken disk.
        (tmp_path / "broken.csv").symlink_to("/proc/self/mem")
        with pytest.raises(UserError, match=r"broken.csv cannot be read \(Input/output error\): check its"):
            opened(tmp_path / "broken.csv", **PROMPT)
    missed = {place: text for place, text in places(*MODULES).items() if place not in made}
    assert not missed, missed
