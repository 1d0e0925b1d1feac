"""What jobs/status.py prints at every stage of a run, and what jobs/merge.py writes of a complete one."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import load_dataset

from specdist.cli import main, merge
from specdist.cli import status as status_main
from specdist.data.leases.membership import Membership
from specdist.data.run.run_folder import RunFolder
from specdist.results import commands
from tests.data.samples import row_result
from tests.job.launching import read_output


def unfinish(output: Path, shard: int) -> None:
    for path in output.glob(f"*/shard-{shard:05d}.*"):
        path.unlink()


def member(output: Path, name: str, shard: int) -> Membership:
    """A replica that holds a shard; its process is this one."""
    found = Membership(output, silent_after_s=60, name=name)
    found.heartbeat.beat()
    assert found.leases.take(f"shard-{shard:05d}", None, above=0) is not None
    return found


def test_the_last_lines_of_a_complete_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_main([str(finished)]) == 0
    stdout = capsys.readouterr().out
    status = json.loads(stdout.splitlines()[-1])
    assert status["complete"] is True and status["num_done"] == status["num_shards"] == 3
    assert status["num_rows"] == status["num_expected_rows"] == 24
    assert status["num_tokens"] == sum(read_output(finished)["num_completion_tokens"].to_pylist())
    assert "3 of 3 shards done" not in stdout and "3 of 3 done, 0 running" in stdout


def test_the_status_of_a_running_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert status_main([str(finished)]) == 1
    stdout = capsys.readouterr().out
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


def test_a_run_that_nobody_works_on_says_how_to_go_on(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replica without a shard, that loads its models, works on it."""
    unfinish(finished, 1)
    assert status_main([str(finished)]) == 1
    words = f"nobody works on it: start it again with python jobs/generate.py --config {finished}"
    assert words in capsys.readouterr().out
    loading = Membership(finished, silent_after_s=60, name="loading")
    loading.heartbeat.beat()
    assert status_main([str(finished)]) == 1 and "nobody works" not in capsys.readouterr().out


@pytest.mark.parametrize("is_terminal", [True, False])
def test_watching_redraws_on_a_terminal(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool
) -> None:
    """Until the run is complete; in a pipe each status stands below the one before."""
    whole = shutil.copytree(finished, tmp_path / "whole")
    unfinish(finished, 1)
    monkeypatch.setattr(
        commands.time, "sleep", lambda _: shutil.copytree(whole, finished, dirs_exist_ok=True)
    )
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
        assert status_main([str(finished), "--watch"]) == 0
    assert ("\x1b[1A" in shown.getvalue()) == is_terminal
    last = re.split(r"\x1b\[\d*[A-Z]", shown.getvalue())[-1]
    assert last.count("shards  ") == (1 if is_terminal else 2)


@pytest.mark.parametrize("words", ["status {}", "show {}", "merge {} --output rows.arrow"])
def test_a_folder_without_a_run_has_no_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert main(words.format(tmp_path).split()) == 2
    found = capsys.readouterr()
    assert found.out == "" and "is not the folder of a run" in found.err


def test_merging_gives_all_rows_in_order(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "merged.parquet")
    assert merge([str(finished), "--output", output]) == 0
    assert capsys.readouterr().out == f"24 rows in {output}\n"
    rows = load_dataset("parquet", data_files=output, split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.to_list() == read_output(finished).to_pylist()
    assert merge([str(finished), "--output", output]) == 2
    assert "exists: give another name, or --overwrite" in capsys.readouterr().err
    assert merge([str(finished), "--output", output, "--overwrite"]) == 0
    assert merge([str(finished), "--output", str(tmp_path / "merged.xlsx")]) == 2
    assert "must end in one of .arrow, .parquet, .jsonl" in capsys.readouterr().err
