"""A run's rows as text: every column is there and reads back unchanged."""

from __future__ import annotations

import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from specdist.data.run import merging, reading
from specdist.data.run.manifest import COMPLETIONS_PER_SHARD, Manifest
from specdist.data.run.merging import merge_run
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import shard_table
from specdist.data.store import storage
from specdist.data.store.storage import read_ahead
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


NUM_SHARDS = 40


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Forty shards of two rows."""
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
    "constants",
    [
        {},
        {"SHARDS_PER_READ": 3},
        {"ROWS_PER_PIECE": 5},
        {"MAX_JOINED_BYTES": 0},
        {"SMALL_BYTES": 0},
    ],
)
def test_shards_are_merged_in_order_however_they_are_read(
    many: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constants: dict[str, int]
) -> None:
    for name, value in constants.items():
        monkeypatch.setattr(reading if name == "SMALL_BYTES" else merging, name, value)
    path = tmp_path / "merged.arrow"
    assert merge_run(many, path) == 2 * NUM_SHARDS
    merged = pa.ipc.open_file(path)
    assert merged.read_all().equals(all_rows(many))
    expected = {"ROWS_PER_PIECE": 14, "MAX_JOINED_BYTES": NUM_SHARDS}
    assert merged.num_record_batches == next((expected[name] for name in constants if name in expected), 1)


@pytest.mark.parametrize("shard", [0, 9, 20, 39])
def test_what_is_wrong_with_one_of_many_shards_is_told_of_that_shard(
    many: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    monkeypatch.setattr(merging, "ROWS_PER_PIECE", 16)
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


def test_a_shard_with_other_columns_than_the_first_is_named(
    many: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "ROWS_PER_PIECE", 16)
    table = pa.ipc.open_file(many.data_path(13)).read_all()
    for path in many.paths(13).needed:
        path.unlink()
    many.finish_shard(13, table.drop_columns(["reference"]), shard_stats(0).to_json())
    with pytest.raises(
        UserError, match=r"shard-00013.arrow does not have the columns of .*shard-00000.arrow"
    ):
        merge_run(many, tmp_path / "merged.arrow")


def test_rows_with_their_own_numbers_of_samples_stay_in_their_shard(tmp_path: Path) -> None:
    """As many rows as planned in each of two shards, but one of the first is in the second."""
    manifest = Manifest(
        fingerprint={"num_rows": 4, "rows_per_shard": 2, "num_samples": 1},
        info={COMPLETIONS_PER_SHARD: [4, 3]},
    )
    folder = open_(tmp_path / "run", manifest=manifest)

    def write(shard: int, rows: list[tuple[int, int]]) -> None:
        for path in folder.paths(shard).needed:
            path.unlink(missing_ok=True)
        inputs = pa.table({"reference": ["a", "b"]})
        results = [row_result(row, sample) for row, sample in rows]
        good = shard_table(
            inputs, [row_result(2 * shard), row_result(2 * shard + 1)], first_row=2 * shard, num_samples=1
        )
        table = good.take([0] * len(rows))
        ids = (
            pa.array([row for row, _ in rows], pa.int64()),
            pa.array([each.sample_index for each in results], pa.int32()),
        )
        for name, column in zip(("row_id", "sample_index"), ids, strict=True):
            table = table.set_column(table.column_names.index(name), name, column)
        assert folder.finish_shard(shard, table, shard_stats(0).to_json())

    write(0, [(0, 0), (1, 0), (1, 1), (1, 2)])
    write(1, [(2, 0), (2, 1), (3, 0)])
    assert merge_run(folder, tmp_path / "right.arrow") == 7
    write(0, [(0, 0), (1, 0), (1, 1), (2, 0)])
    write(1, [(2, 1), (3, 0), (3, 1)])
    with pytest.raises(UserError, match=r"shard-00000.arrow has 4 rows; .* from 0 to 1, in order"):
        merge_run(folder, tmp_path / "wrong.arrow")


def test_what_is_read_ahead_comes_in_order_and_its_errors_too() -> None:
    asked: list[int] = []

    def square(number: int) -> int:
        asked.append(number)
        if number == 50:
            raise UserError("fifty")
        return number * number

    found = read_ahead(square, range(1000))
    assert [next(found) for _ in range(50)] == [number * number for number in range(50)]
    # No more than a few are computed before they are asked for.
    assert len(asked) <= 50 + 2 * storage.THREADS_AHEAD + 1
    with pytest.raises(UserError, match="fifty"):
        next(found)
    assert len(asked) <= 50 + 2 * storage.THREADS_AHEAD + 1
