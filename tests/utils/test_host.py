"""What is read of ``/proc``, beside psutil's own reading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from specdist.utils import host

# Other processes take and release memory between two looks.
SHARE = 0.2


def test_a_process_is_described_as_psutil_describes_it() -> None:
    known = psutil.Process()
    # psutil takes the machine's start in whole seconds.
    assert abs(host.process_start_s() - known.create_time()) < 2
    assert host.command_line(os.getpid()) == known.cmdline()
    assert host.available_memory_bytes() == pytest.approx(psutil.virtual_memory().available, rel=SHARE)


def test_one_that_has_ended_has_no_command_line() -> None:
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        assert host.command_line(child.pid) == command
        child.stdin.close()
        # Nobody has asked for its exit code: a zombie.
        while (found := host.process_state(child.pid)) and found[0] != "Z":
            pass
        with pytest.raises(ProcessLookupError):
            host.command_line(child.pid)
    assert host.process_state(child.pid) is None
    with pytest.raises(FileNotFoundError):
        host.command_line(child.pid)


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", absent)
    assert host.available_memory_bytes() == psutil.virtual_memory().total
    assert host.process_start_s() >= psutil.Process().create_time()
