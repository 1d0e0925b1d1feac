"""A run's rows as text: every column is there and reads back unchanged."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from specdist.data.run import merging
from specdist.data.run.manifest import Manifest
from specdist.data.run.merging import merge_run
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import shard_table
from specdist.utils.errors import UserError
from tests.data.folders import open_
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


NUM_SHARDS = 12


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Shards of two rows each."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    manifest = Manifest(fingerprint={"num_rows": 2 * NUM_SHARDS, "rows_per_shard": 2, "num_samples": 1})
    folder = open_(tmp_path / "many", manifest=manifest)
    for shard in range(NUM_SHARDS):
        rewrite(folder, shard)
    return folder


def rewrite(folder: RunFolder, shard: int, text: str = "answer", **changes: pa.Array) -> None:
    """A shard, perhaps in the place of another, with a column for its inputs and these changes."""
    for path in folder.paths(shard).needed:
        path.unlink(missing_ok=True)
    rows = [2 * shard, 2 * shard + 1]
    inputs = pa.table({"reference": [f"reference {row}" for row in rows]})
    results = [row_result(row, completion=text) for row in rows]
    table = shard_table(inputs, results, first_row=rows[0], num_samples=1)
    for name, column in changes.items():
        place = table.column_names.index(name)
        table = table.set_column(
            place, table.schema.field(place), column.cast(table.schema.field(place).type)
        )
    assert folder.finish_shard(shard, table, shard_stats(0).to_json())


def all_rows(folder: RunFolder) -> pa.Table:
    """One file after the other."""
    return pa.concat_tables(
        pa.ipc.open_file(folder.data_path(shard)).read_all() for shard in range(NUM_SHARDS)
    )


@pytest.mark.parametrize(
    ("constants", "num_batches"),
    [({}, 1), ({"ROWS_PER_PIECE": 5}, 6), ({"BYTES_PER_PIECE": 0}, 12)],
)
def test_shards_are_merged_in_order_however_many_are_joined(
    many: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    constants: dict[str, int],
    num_batches: int,
) -> None:
    for name, value in constants.items():
        monkeypatch.setattr(merging, name, value)
    path = tmp_path / "merged.arrow"
    assert merge_run(many, path) == 2 * NUM_SHARDS
    merged = pa.ipc.open_file(path)
    assert merged.read_all().equals(all_rows(many)) and merged.num_record_batches == num_batches


def test_what_is_wrong_with_one_of_many_shards_is_told_of_that_shard(many: RunFolder, tmp_path: Path) -> None:
    shard = 5
    first, output = 2 * shard, tmp_path / "merged.arrow"
    content = bytearray(many.data_path(shard).read_bytes())
    content[len(content) // 2] ^= 1
    damages = [
        (lambda: many.data_path(shard).write_bytes(content), "is missing, damaged, or has changed since"),
        (
            lambda: rewrite(many, shard, row_id=pa.array([first + 1, first])),
            f"from {first} to {first + 1}, in",
        ),
        (
            lambda: rewrite(many, shard, row_id=pa.array([first + 1, first + 2])),
            "has 2 rows; the manifest says",
        ),
        (lambda: rewrite(many, shard, sample_index=pa.array([0, 1])), "1 of each input row"),
    ]
    for harm, message in damages:
        harm()
        with pytest.raises(UserError, match=rf"shard-{shard:05d}.arrow .*{message}"):
            merge_run(many, output)
        assert not output.exists()
    rewrite(many, shard)
    assert merge_run(many, output) == 2 * NUM_SHARDS
