"""The exit code of a launch is that of its ranks, unlike accelerate's own."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from specdist.job.ranks import launch
from tests.job.launching import ACCELERATE_CONFIG


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
