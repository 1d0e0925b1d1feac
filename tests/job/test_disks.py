"""Disks that fill up, fail, or lose files during the job: it is reported, and no finished row is lost."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from specdist.job.ranks.logs import RunLog, add_run_log
from specdist.job.recording.recording import Recorder
from tests.job.launching import Ended, refused, run_here, shard_bytes
from tests.job.pair import Pair


def test_an_error_of_the_disk_ends_the_job_and_a_restart_goes_on(
    options: dict[str, Any],
    greedy: tuple[Path, Ended],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From some moment on, fsync fails."""
    real, num_calls, moment = os.fsync, 0, 19

    def fsync(descriptor: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > moment:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        ended = run_here(**options, output=tmp_path / "run")
    assert ended.code == 28 and "cannot be written" in ended.stderr and "quota exceeded" in ended.stderr
    assert run_here(**options, output=tmp_path / "run").code == 0
    assert shard_bytes(tmp_path / "run") == shard_bytes(greedy[0])


def test_a_log_that_cannot_be_written_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results have their own files: a log must not cost a night of work, nor print a traceback per line."""
    (tmp_path / "rank.log").symlink_to("/dev/full")
    handler = RunLog(tmp_path / "rank.log")
    for _ in range(3):
        handler.emit(logging.LogRecord("job", logging.INFO, "", 1, "text", (), None))
    handler.close()
    assert capsys.readouterr().err.count("\n") == 1 and not capsys.readouterr().out
    num_handlers = len(logging.getLogger().handlers)
    add_run_log(tmp_path / "gone" / "rank.log", "draft")
    assert len(logging.getLogger().handlers) == num_handlers


@pytest.mark.parametrize("change", ["other", "touched"])
def test_prompts_that_change_while_the_job_runs_end_it(
    pair: Pair,
    options: dict[str, Any],
    greedy: tuple[Path, Ended],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    """After the first shard: what is finished stays, and the job continues once the prompts are restored."""
    prompts, output = tmp_path / "prompts.arrow", tmp_path / "run"
    content = pair.prompts.read_bytes()
    prompts.write_bytes(content)

    def disturb(recorder: Recorder, completion: Any) -> None:
        real(recorder, completion)
        if change == "other":
            prompts.write_bytes(content.replace(b"reference 3", b"reference 4"))
        else:
            prompts.touch()

    real = Recorder.record
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "record", disturb)
        ended = run_here(**(options | {"prompts": prompts}), output=output)
    if change == "touched":
        assert ended.code == 0
    else:
        refused(ended, f"{prompts} was deleted or changed", "restore it", "finished rows")
        assert len(shard_bytes(output)) < 3
        assert run_here(**(options | {"prompts": prompts}), output=output).code == 2
        prompts.write_bytes(content)
        assert run_here(**(options | {"prompts": prompts}), output=output).code == 0
    assert shard_bytes(output) == shard_bytes(greedy[0])
