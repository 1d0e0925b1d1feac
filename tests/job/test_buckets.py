"""Runs in a bucket, through faults of its server and the end of replicas: every row once, the same bytes."""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest

import specdist
from specdist.cli import evaluate, merge, report, show, status
from specdist.data.store import object_store
from specdist.data.store.storage import StorePath
from tests.data.s3 import Failure, S3Server, folder_of, s3_server
from tests.job.fault_injection import NUM_ROWS, SHARED, join_all
from tests.job.launching import refused, run_here, shard_bytes
from tests.job.pair import Pair
from tests.job.telling import fork_telling


@pytest.fixture(scope="module")
def options(pair: Pair) -> dict[str, Any]:
    # Each shard is some twenty requests.
    return pair.job(**SHARED | {"rows_per_shard": 8, "max_num_seqs": 4, "max_new_tokens": 16})


@pytest.fixture(scope="module")
def undisturbed(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run_here(**options, output=output).code == 0
    return shard_bytes(output)


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def bucket(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorePath:
    return folder_of(server, tmp_path, monkeypatch)


def stored_shards(run: StorePath) -> dict[str, bytes]:
    return {name: (run / "shards" / name).read_bytes()
            for name in sorted((run / "shards").names()) if name.endswith(".arrow")}  # fmt: skip


def left_over(run: StorePath) -> list[str]:
    """What a complete run does not have."""
    names = [f"{folder}/{name}" for folder in ("shards", "stats", "parts", "leases")
             for name in (run / folder).names()]  # fmt: skip
    return [name for name in names if not name.endswith((".arrow", ".json")) and "leases/setup." not in name]


def test_a_run_in_a_bucket_has_the_bytes_of_one_in_a_folder(
    bucket: StorePath,
    server: S3Server,
    options: dict[str, Any],
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With prompts in the bucket too, on a server of which every eighth answer is an error, some of them
    after the work was done."""
    prompts = bucket / "prompts.arrow"
    prompts.upload(Path(options["prompts"]))
    rng = random.Random(1)

    def fault(method: str, path: str) -> Failure | None:
        return (
            Failure(rng.choice([500, 503]), after_work=rng.random() < 0.5) if rng.random() < 1 / 8 else None
        )

    server.fault = fault
    monkeypatch.setattr(object_store, "FIRST_WAIT_S", 0.02)
    chosen = options | {"prompts": prompts, "output": bucket / "run", "cache_dir": tmp_path / "cache"}
    ended = run_here(**chosen)
    server.fault = lambda method, path: None
    assert ended.totals["complete"] and ended.totals["output"] == str(bucket / "run")
    assert stored_shards(bucket / "run") == undisturbed
    assert left_over(bucket / "run") == []
    read_with_every_tool(str(bucket / "run"), undisturbed, tmp_path, monkeypatch)
    # Nothing is left to do, and another seed is another run.
    assert run_here(**chosen).totals["complete"]
    refused(run_here(**chosen, seed=1), "--output holds a run with different settings", "seed")


def read_with_every_tool(
    url: str, undisturbed: dict[str, bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads a folder reads a bucket, too."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    run = specdist.load_run(url, verify=True)
    assert run.is_complete and run.table.num_rows == NUM_ROWS
    shown = [run_tool(tool, url) for tool in (status, show)]
    assert f"{NUM_ROWS} of {NUM_ROWS}" in shown[0] and "\ncompletion  " in shown[1]
    run_tool(merge, url, "--output", str(folder / "merged.arrow"))
    assert pa.ipc.open_file(pa.memory_map(str(folder / "merged.arrow"))).read_all().equals(run.table)
    run_tool(report, url, "--folder", str(folder / "report"))
    assert (folder / "report" / "report.html").stat().st_size > 0
    run_tool(evaluate, url, "--against", url, "--output", str(folder / "evaluation"))
    assert json.loads((folder / "evaluation" / "results.json").read_text())["identity"]


def run_tool(main: Callable[[Sequence[str]], int], *arguments: str) -> str:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(arguments) == 0
    return told.getvalue()


def test_a_replica_that_is_killed_in_an_upload_is_replaced(
    bucket: StorePath,
    server: S3Server,
    options: dict[str, Any],
    undisturbed: dict[str, bytes],
    tmp_path: Path,
) -> None:
    """Two replicas; the first upload of a shard's data hangs, and its replica is killed meanwhile."""
    hanging: list[str] = []

    def fault(method: str, path: str) -> Failure | None:
        if method == "PUT" and "shards/shard-" in path and ".arrow" in path and not hanging:
            hanging.append(path)
            return Failure(seconds=20)
        return None

    server.fault = fault
    run = {**options, "output": bucket / "run", "cache_dir": tmp_path / "cache"}
    words = tmp_path / "words-1"
    first = fork_telling(words, **run)
    while not hanging:
        assert first.exitcode is None, words.read_text()
        time.sleep(0.05)
    second = fork_telling(tmp_path / "words-2", **run)
    time.sleep(0.3)
    first.kill()
    assert join_all([first, second]) == [-signal.SIGKILL, 0]
    assert stored_shards(bucket / "run") == undisturbed
    assert left_over(bucket / "run") == []


def test_what_cannot_be_used_ends_a_job_before_models_are_loaded(
    bucket: StorePath, options: dict[str, Any]
) -> None:
    """With exit code 2, and no traceback."""
    refused(run_here(**options, output="s3://missing/run"), "s3://missing", "create it, or correct the URL")
    refused(run_here(**options | {"prompts": bucket / "none"}, output=bucket), "there is no such object")
