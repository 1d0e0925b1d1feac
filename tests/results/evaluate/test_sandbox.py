"""Programs that go wrong, and what is kept from them."""

from __future__ import annotations

import dataclasses
import os
import socket
import time

import psutil
import pytest

from specdist.results.evaluate.tasks import sandbox
from specdist.results.evaluate.tasks.sandbox import PROGRAM, Limits, check_sandbox, run_program
from specdist.utils.errors import UserError

LIMITS = Limits(wall_s=20.0, memory_bytes=256 * 2**20, file_bytes=2**20)
SHORT = dataclasses.replace(LIMITS, wall_s=0.7)


def outcome(program: str, limits: Limits = LIMITS) -> tuple[str, str | None]:
    found = run_program(program, limits)
    return found.outcome, found.detail


def test_programs_pass_or_fail_as_they_end() -> None:
    assert outcome("assert sum([1, 2]) == 3") == ("passed", None)
    assert outcome("assert sum([1, 2]) == 4, 'sum'") == ("failed", "AssertionError: sum")
    assert outcome("def f(:")[1].startswith("SyntaxError")
    # Much of the standard library inspects its caller's frame, or expects to run from a file.
    library = "import collections, enum, dataclasses, decimal, re, tempfile\n"
    library += "collections.namedtuple('P', 'x y')\n"
    assert outcome(library + "with tempfile.TemporaryFile() as file:\n    file.write(b'x')")[0] == "passed"
    assert outcome("if __name__ == '__main__':\n    raise ValueError")[0] == "passed"


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("import os\nos._exit(0)", "exit code 0"),
        ("import ctypes\nctypes.CDLL(None)", "PermissionError: ctypes.dlopen is refused here"),
        ("import signal\nsignal.raise_signal(9)", "killed by SIGKILL"),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E", "E: <exception str() failed>"),
    ],
)
def test_a_program_that_ends_early_does_not_pass(program, detail) -> None:
    found, how = outcome(program + "\nassert False")
    assert found == "failed" and how is not None and how.endswith(detail)


def test_time_is_limited() -> None:
    """Also for a program that prints without end, sleeps, or ignores signals; the rest is time to start."""
    deaf = "import signal\nfor n in (2, 15, 24):\n    signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    for program in ("while True: print('x' * 10**6)", "import time\ntime.sleep(60)", deaf):
        began = time.monotonic()
        assert outcome(program, SHORT) == ("timed out", None)
        assert time.monotonic() - began < 20
    assert not programs()


def test_memory_and_file_sizes_are_limited() -> None:
    assert outcome("blocks = [bytearray(2**20) for _ in range(10**4)]") == ("failed", "MemoryError")
    for program in ("open('big', 'wb').write(bytes(2**22))", "import sys\nsys.stderr.write('x' * 2**22)"):
        found, detail = outcome(program)
        assert found == "failed" and detail is not None and len(detail) <= 500
    assert outcome("files = [open('a') if i else open('a', 'w') for i in range(100)]")[0] == "failed"


def test_a_program_changes_nothing_outside_its_folder(tmp_path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    programs = [
        f"open({str(tmp_path / 'new')!r}, 'w').write('x')",
        f"open({str(kept)!r}, 'a').write('x')",
        f"import os\nos.remove({str(kept)!r})",
        f"import os\nos.chmod({str(kept)!r}, 0)",
        f"import os\nos.symlink({str(tmp_path)!r}, 'link')\nopen('link/new', 'w')",
        "open('../report', 'w')",
    ]
    for program in programs:
        found, detail = outcome(program)
        assert found == "failed" and detail is not None and "PermissionError" in detail, program
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and kept.read_text() == "kept"
    assert kept.stat().st_mode & 0o400
    own = "import os\nopen('own', 'w').write('x')\nassert open('own').read() == 'x'\nos.remove('own')"
    assert outcome(own) == ("passed", None)


def test_a_program_connects_to_nothing(tmp_path) -> None:
    """To no port, and to no socket of this machine, which is a file."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        port = server.getsockname()[1]
        for program in (
            f"socket.create_connection(('127.0.0.1', {port}), timeout=5)",
            f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})",
        ):
            assert outcome(f"import socket\n{program}")[0] == "failed"
        for each in (server, local):
            each.settimeout(0.2)
            with pytest.raises(TimeoutError):
                each.accept()


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['sleep', '60'])",
        "import os\nos.kill(os.getppid(), 9)",
    ],
)
def test_a_program_starts_and_ends_no_process(program) -> None:
    found, detail = outcome(program)
    assert found == "failed" and detail is not None and "is refused here" in detail


def programs() -> list[psutil.Process]:
    """Programs that this process has started and that still run."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [child for child in children if str(PROGRAM) in child.cmdline()]


def test_a_program_sees_nothing_of_this_process(monkeypatch) -> None:
    monkeypatch.setenv("SPECDIST_TEST_SECRET", "secret")
    assert outcome("import os, sys\nassert 'SPECDIST_TEST_SECRET' not in os.environ")[0] == "passed"
    assert outcome("import sys\nassert sys.stdin.read() == '' and not sys.argv[1:]")[0] == "passed"
    assert outcome("import os\nassert os.listdir('.') == []")[0] == "passed"


def test_a_crash_of_the_sandbox_is_no_outcome(tmp_path, monkeypatch) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('broken')")
    monkeypatch.setattr("specdist.results.evaluate.tasks.sandbox.PROGRAM", broken)
    with pytest.raises(RuntimeError, match=r"could not be started: [^$]*ValueError: broken"):
        run_program("pass", LIMITS)


def test_limits_too_small_for_any_program_are_refused(monkeypatch) -> None:
    check_sandbox()
    monkeypatch.setattr(
        sandbox, "run_program", lambda program: run_program(program, Limits(memory_bytes=2**20))
    )
    with pytest.raises(UserError, match="a program of a few imports did not finish within"):
        check_sandbox()
