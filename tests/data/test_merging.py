"""A run's rows as text: every column is there and reads back unchanged."""

from __future__ import annotations

import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from specdist.data import RunFolder, shard_table
from specdist.data.merging import merge_run
from specdist.utils.errors import UserError
from tests.data.samples import row_result
from tests.finished_runs import NUM_ROWS, NUM_SAMPLES, shard_stats, write_run

TEXTS = ["", 'a "quoted", text', "two\nlines", "naïve ☃", None, " ", "7"]


def run_with(path: Path, **columns: pa.Array) -> RunFolder:
    """A complete run with these input columns, and with lists of token ids."""
    folder = write_run(path, ())
    plan = folder.plan()
    for shard in range(plan.num_shards):
        first, end = plan.bounds(shard)
        inputs = pa.table({name: column[first:end] for name, column in columns.items()})
        results = [
            row_result(row, sample, completion_ids=(row, sample))
            for row in range(first, end)
            for sample in range(NUM_SAMPLES)
        ]
        table = shard_table(inputs, results, first_row=first, num_samples=NUM_SAMPLES)
        assert folder.finish_shard(shard, table, shard_stats(shard).to_json())
    return folder


def columns() -> dict[str, pa.Array]:
    return {
        "text": pa.array(TEXTS),
        "label": pa.array(list("aabbcca")).dictionary_encode(),
        "tags": pa.array([[{"name": text}] for text in TEXTS]),
        "score": pa.array([1.5, float("nan"), float("inf"), None, 0.0, -1.0, 1e300]),
        "raw": pa.array([b"\xff\x00"] * NUM_ROWS),
        "when": pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5)] * NUM_ROWS, pa.timestamp("us")),
        "price": pa.array([Decimal("1.20")] * NUM_ROWS),
    }


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return run_with(tmp_path / "run", **columns())


def test_rows_survive_json_lines(folder: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "merged.jsonl"
    assert merge_run(folder, path) == NUM_ROWS * NUM_SAMPLES
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [(row["row_id"], row["sample_index"]) for row in rows] == [
        (row, sample) for row in range(NUM_ROWS) for sample in range(NUM_SAMPLES)
    ]
    assert [row["text"] for row in rows[::NUM_SAMPLES]] == TEXTS
    assert [row["tags"] for row in rows[::NUM_SAMPLES]] == [[{"name": text}] for text in TEXTS]
    assert [row["score"] for row in rows[::NUM_SAMPLES]] == [1.5, None, None, None, 0.0, -1.0, 1e300]
    assert rows[5]["completion_ids"] == [2, 1] and rows[5]["error"] is None
    last = rows[-1]
    assert (last["label"], last["raw"], last["when"]) == ("a", "/wA=", "2026-01-02T03:04:05")
    assert last["price"] == "1.20" and "☃" in path.read_text()


def test_rows_survive_csv(folder: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "merged.csv"
    assert merge_run(folder, path) == NUM_ROWS * NUM_SAMPLES
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row_id"] for row in rows[::NUM_SAMPLES]] == [str(row) for row in range(NUM_ROWS)]
    assert [row["text"] for row in rows[::NUM_SAMPLES]] == [text or "" for text in TEXTS]
    assert [json.loads(row["tags"]) for row in rows[::NUM_SAMPLES]] == [[{"name": text}] for text in TEXTS]
    assert json.loads(rows[5]["completion_ids"]) == [2, 1]
    last = rows[-1]
    assert (last["label"], last["raw"], last["price"]) == ("a", "/wA=", "1.20")
    assert last["when"].startswith("2026-01-02 03:04:05")


def test_null_differs_from_an_empty_text_in_a_csv_file(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", text=pa.array(["", *[None] * (NUM_ROWS - 1)]))
    merge_run(folder, tmp_path / "merged.csv")
    lines = (tmp_path / "merged.csv").read_text().splitlines()
    assert lines[1].endswith(',""') and lines[-1].endswith(",")


def test_a_damaged_shard_is_found_when_it_is_merged_as_text(folder: RunFolder, tmp_path: Path) -> None:
    content = bytearray(folder.data_path(1).read_bytes())
    content[len(content) // 2] ^= 1
    folder.data_path(1).write_bytes(content)
    for suffix in (".jsonl", ".csv"):
        with pytest.raises(UserError, match=r"shard-00001.arrow"):
            merge_run(folder, tmp_path / f"merged{suffix}")
        assert not (tmp_path / f"merged{suffix}").exists()
