"""What jobs/status.py prints at every stage of a run, and what jobs/merge.py writes of a complete one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import load_dataset

from specdist.data.leases.membership import Membership
from specdist.data.run.merging import merge_run
from specdist.data.run.run_folder import RunFolder
from specdist.job.totals.status import StatusReader, error_kind
from specdist.utils.errors import UserError
from tests.data.samples import row_result
from tests.job.launching import read_output
from tests.ranks import REPOSITORY


def unfinish(output: Path, shard: int) -> None:
    for path in output.glob(f"*/shard-{shard:05d}.*"):
        path.unlink()


def job(name: str, *arguments: object) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, str(REPOSITORY / "jobs" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    return ended.returncode, ended.stdout, ended.stderr


def member(output: Path, name: str, shard: int) -> Membership:
    """A replica that holds a shard; its process is this one."""
    found = Membership(output, silent_after_s=60, name=name)
    found.heartbeat.beat()
    assert found.leases.take(f"shard-{shard:05d}", None, above=0) is not None
    return found


def test_the_last_lines_of_a_complete_run(finished: Path) -> None:
    code, stdout, _ = job("status.py", finished)
    assert code == 0
    status = json.loads(stdout.splitlines()[-1])
    assert status["complete"] is True and status["num_done"] == status["num_shards"] == 3
    assert status["num_rows"] == status["num_expected_rows"] == 24
    assert status["num_tokens"] == sum(read_output(finished)["num_completion_tokens"].to_pylist())
    assert "3 of 3 shards done" not in stdout and "3 of 3 done, 0 running" in stdout


def test_the_status_of_a_running_run(finished: Path) -> None:
    """One shard done, one held by a replica with two rows, one held by a replica whose process has ended."""
    unfinish(finished, 1)
    unfinish(finished, 2)
    alive, dead = member(finished, "alive", 1), member(finished, "dead", 2)
    with RunFolder(finished).parts(1, 1) as log:
        log.append(row_result(10, completion_ids=(1, 2), num_completion_tokens=2))
        log.append(row_result(11, finish_reason="error", error="the prompt has 300 tokens"))
    alive.heartbeat.count(2)
    alive.heartbeat._start -= 4.0
    alive.heartbeat.beat()
    child = subprocess.Popen([sys.executable, "-c", ""])
    dead.heartbeat._beat.process = replace(dead.heartbeat._beat.process, pid=child.pid)
    child.wait()
    dead.heartbeat.beat()
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    code, stdout, _ = job("status.py", finished)
    assert code == 1
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    status = json.loads(stdout.splitlines()[-1])
    assert (status["num_done"], status["num_waiting"], status["num_replicas"]) == (1, 0, 1)
    (running,), (failed,) = status["running"], status["failed"]
    assert (running["shard"], running["replica"], running["num_rows"]) == (1, "alive", 2)
    assert (failed["shard"], failed["replica"], failed["num_rows"]) == (2, "dead", 0)
    assert status["num_rows"] == 12
    assert status["tokens_per_s"] == pytest.approx(0.5, rel=0.1)
    assert status["left_s"] == pytest.approx(12 / 0.25, rel=0.1)
    assert status["errors"] == {"the prompt has N tokens": 1}
    assert "by alive since" in stdout and "by dead since" in stdout


def test_shards_that_were_given_back_wait(finished: Path) -> None:
    unfinish(finished, 1)
    holder = member(finished, "alive", 1)
    holder.leases.release(holder.leases.latest()["shard-00001"])
    status = StatusReader(finished).read()
    assert (status.num_done, status.running, status.failed, status.num_waiting) == (2, [], [], 1)


def test_a_remote_replica_is_first_assessed_by_the_age_of_its_heartbeat(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every look reads the heartbeat, however soon after the last one it is.
    monkeypatch.setattr("specdist.data.leases.heartbeat.BEATS_PER_SILENCE", math.inf)
    unfinish(finished, 1)
    holder = member(finished, "elsewhere", 1)
    holder.heartbeat._beat.process = replace(holder.heartbeat._beat.process, machine="another")
    holder.heartbeat.beat()
    assert [held.shard for held in StatusReader(finished).read().running] == [1]
    os.utime(finished / "leases" / "elsewhere.beat", (0, 0))
    reader = StatusReader(finished)
    assert [held.shard for held in reader.read().failed] == [1]
    # Then it beats: a clock was wrong.
    holder.heartbeat.beat()
    os.utime(finished / "leases" / "elsewhere.beat", (0, 0))
    assert [held.shard for held in reader.read().running] == [1]


def test_a_folder_without_a_run_has_no_status(tmp_path: Path) -> None:
    code, stdout, stderr = job("status.py", tmp_path)
    assert (code, stdout) == (2, "")
    assert "is not the folder of a run" in stderr


def test_errors_that_differ_in_numbers_are_of_one_kind() -> None:
    assert error_kind("the prompt has 300 tokens, more than 127") == "the prompt has N tokens, more than N"


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_merging_gives_all_rows_in_order(finished: Path, tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"merged{suffix}"
    code, stdout, stderr = job("merge.py", finished, "--output", output)
    assert (code, stderr) == (0, "")
    assert stdout == f"24 rows in {output}\n"
    expected = read_output(finished)
    rows = load_dataset(
        suffix[1:], data_files=str(output), split="train", cache_dir=str(tmp_path / "cache")
    ).to_list()
    assert rows == expected.to_pylist()
    if suffix == ".arrow":
        code, _, stderr = job("merge.py", finished, "--output", output)
        assert code == 2 and "exists: give another name, or --overwrite" in stderr
        assert job("merge.py", finished, "--output", output, "--overwrite")[0] == 0


def test_dictionaries_of_shards_become_one(tmp_path: Path, finished: Path) -> None:
    """Each file of a run has its own."""
    folder = RunFolder(finished)
    for shard in range(3):
        table = pa.ipc.open_file(folder.data_path(shard)).read_all()
        labels = pa.array([f"label {shard}"] * table.num_rows).dictionary_encode()
        unfinish(finished, shard)
        folder.finish_shard(shard, table.append_column("label", labels), {})
    merge_run(folder, tmp_path / "merged.arrow")
    merged = pa.ipc.open_file(tmp_path / "merged.arrow").read_all()
    assert merged["label"].to_pylist() == ["label 0"] * 10 + ["label 1"] * 10 + ["label 2"] * 4


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def rewritten(folder: RunFolder, shard: int, table: pa.Table) -> None:
    unfinish(folder.path, shard)
    folder.finish_shard(shard, table, {})


def test_an_incomplete_or_damaged_run_is_not_merged(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "merged.arrow"
    folder = RunFolder(finished)
    table = pa.ipc.open_file(folder.data_path(1)).read_all()
    for harm, message in (
        (lambda: damage(folder.data_path(1)), r"shard-00001.arrow is missing, damaged, or has changed since"),
        (lambda: rewritten(folder, 1, table.slice(1)), r"has 9 rows; the manifest says 10"),
        (lambda: rewritten(folder, 1, table.take(list(range(9, -1, -1)))), "in order"),
        (lambda: rewritten(folder, 1, table.drop_columns(["reference"])), "does not have the columns of"),
        (lambda: unfinish(finished, 1), r"not complete: 1 of 3 shards are missing \(1\)"),
    ):
        harm()
        with pytest.raises(UserError, match=message):
            merge_run(folder, output)
        assert not output.exists()
    with pytest.raises(UserError, match=r"must end in one of .arrow, .parquet, .jsonl, .csv"):
        merge_run(folder, tmp_path / "merged.xlsx")
