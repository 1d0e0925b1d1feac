"""The exit code of a launch is that of its ranks, unlike accelerate's own; ranks on CPUs are forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from specdist.cli import generate
from specdist.job.ranks import launch
from specdist.utils.host import process_start_s
from tests.forked import fork
from tests.job.launching import ACCELERATE_CONFIG, TIMEOUT_S, job_arguments, read_output


def failed(*codes: int) -> ChildFailedError:
    """Ranks that have ended one after the other."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        for rank, code in enumerate(codes)
    }
    for second, failure in enumerate(failures.values()):
        failure.timestamp = second
    return ChildFailedError("job", failures)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (failed(75, 75), 75),
        (failed(2), 2),
        (failed(-signal.SIGKILL, 1, 1), 137),
        (subprocess.CalledProcessError(2, "job"), 2),
        (subprocess.CalledProcessError(-signal.SIGTERM, "job"), 143),
        (SignalException("asked to stop", signal.SIGTERM), 75),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    error: Exception | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []

    def launch_command(options: Any) -> None:
        launched.append(options)
        if error is not None:
            raise error

    monkeypatch.setattr("accelerate.commands.launch.launch_command", launch_command)
    arguments = ["--config_file", str(ACCELERATE_CONFIG), "--num_processes", "3", "job.py", "--top_p", "0.5"]
    assert launch.main(arguments) == code
    assert launched[0].num_processes == 3 and launched[0].training_script_args == ["--top_p", "0.5"]


def forked(folder: Path, *programs: str) -> None:
    """A launcher, of which each rank tells when the launch began, and starts over as another program."""
    if (code := launch.fork_ranks(len(programs))) is None:
        rank = os.environ["RANK"]
        (folder / rank).write_text(f"{process_start_s()} {os.getsid(0) == os.getpid()}")
        os.execv(sys.executable, [sys.executable, "-c", programs[int(rank)]])
    told = {path.read_text() for path in folder.iterdir()}
    os._exit(code if told == {f"{process_start_s()} True"} else -1)


def run_job(words: list[str]) -> None:
    os._exit(generate(words))


@pytest.mark.parametrize(
    ("program", "code"), [("exit(0)", 0), ("exit(75)", 75), ("import os; os.kill(os.getppid(), 15)", 143)]
)
def test_forked_ranks_end_together(program: str, code: int, tmp_path: Path) -> None:
    waits = f"import time; time.sleep({1 if code == 0 else TIMEOUT_S})"
    (process := fork(forked, tmp_path, waits, program)).start()
    process.join(TIMEOUT_S // 2)
    assert process.exitcode == code


@pytest.mark.ranks
def test_a_job_on_cpus_forks_its_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    words = job_arguments(generate, options | {"tp_size": 2, "output": tmp_path / "run"})
    (process := fork(run_job, words)).start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0 and read_output(tmp_path / "run").num_rows
    assert len([*(tmp_path / "run" / "logs").iterdir()]) == 3
