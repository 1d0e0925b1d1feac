"""Hostile programs, once isolated by the kernel alone and once by Python alone."""

from __future__ import annotations

import dataclasses
import socket
import time

import psutil
import pytest

from specdist.results.evaluate.tasks.sandbox import Limits, check_sandbox, run_program, run_programs
from specdist.utils.errors import UserError

LIMITS = Limits(wall_s=20.0, memory_bytes=256 * 2**20, file_bytes=2**20)
SHORT = dataclasses.replace(LIMITS, wall_s=0.7)
KERNEL = {"use_audit_hook": False}
PYTHON = {"use_namespaces": False}
ALL_PARTS = {"network namespace", "process namespace", "read-only files"}


@pytest.fixture(params=[KERNEL, PYTHON], ids=["kernel", "python"])
def way(request) -> dict[str, bool]:
    if request.param is KERNEL and set(run_program("pass", LIMITS, **KERNEL).isolation) != ALL_PARTS:
        pytest.skip("this machine's kernel does not let this user have namespaces")
    return request.param


def outcome(program: str, way: dict[str, bool], limits: Limits = LIMITS) -> tuple[str, str | None]:
    found = run_program(program, limits, **way)
    return found.outcome, found.detail


def test_programs_pass_or_fail_as_they_end(way) -> None:
    assert outcome("assert sum([1, 2]) == 3", way) == ("passed", None)
    assert outcome("assert sum([1, 2]) == 4, 'sum'", way) == ("failed", "AssertionError: sum")
    assert outcome("def f(:", way)[1].startswith("SyntaxError")
    # Much of the standard library inspects its caller's frame, or expects to run from a file.
    library = (
        "import collections, enum, dataclasses, decimal, re, tempfile\ncollections.namedtuple('P', 'x y')\n"
    )
    assert outcome(library + "with tempfile.TemporaryFile() as file:\n    file.write(b'x')", way) == (
        "passed",
        None,
    )
    assert outcome("if __name__ == '__main__':\n    raise ValueError", way) == ("passed", None)


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("import os\nos._exit(0)", "exit code 0"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        # Text in the report file without the secret is not a report.
        ('import os\nos.write(3, b\'{"outcome": "passed", "detail": null}\')\nos._exit(0)', "exit code 0"),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E", "E"),
    ],
)
def test_a_program_that_exits_early_does_not_pass(way, program, detail) -> None:
    found, how = outcome(program + "\nassert False", way)
    assert found in ("ended early", "failed") and how == detail


def test_time_is_limited(way) -> None:
    """Also for a program that prints without end or ignores signals; the rest is time to start processes."""
    deaf = "import signal\nfor n in (2, 15, 24):\n    signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    for program in ("while True: print('x' * 10**6)", deaf):
        began = time.monotonic()
        assert outcome(program, way, SHORT) == ("timed out", None)
        assert time.monotonic() - began < 20


def test_memory_and_file_sizes_are_limited(way) -> None:
    assert outcome("blocks = [bytearray(2**20) for _ in range(10**4)]", way) == ("failed", "MemoryError: ")
    found, detail = outcome("open('big', 'wb').write(bytes(2**22))", way)
    assert found == "failed" and detail is not None and detail.startswith("OSError")
    assert outcome("files = [open('a') if i else open('a', 'w') for i in range(100)]", way)[0] == "failed"


def test_a_program_writes_nothing_outside_its_folder(way, tmp_path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    programs = [
        f"open({str(tmp_path / 'new')!r}, 'w').write('x')",
        f"open({str(kept)!r}, 'a').write('x')",
        f"import os\nos.remove({str(kept)!r})",
        f"import os\nos.rename({str(kept)!r}, {str(tmp_path / 'moved')!r})",
        f"import os\nos.chmod({str(kept)!r}, 0)",
        f"import os\nos.symlink({str(tmp_path)!r}, 'link')\nopen('link/new', 'w')",
        f"import pathlib\npathlib.Path({str(tmp_path / 'folder')!r}).mkdir()",
    ]
    for program in programs:
        assert outcome(program, way)[0] == "failed", program
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and kept.read_text() == "kept"
    assert kept.stat().st_mode & 0o400
    assert outcome("open('own', 'w').write('x')\nassert open('own').read() == 'x'", way)[0] == "passed"


def test_a_program_has_no_network(way) -> None:
    """The test runs a server on the loopback interface, which the program would reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert outcome(program, way)[0] == "failed"
        with pytest.raises(TimeoutError):
            server.accept()


def test_unix_sockets_are_out_of_reach(tmp_path) -> None:
    """They are files, which a network namespace does not hide; Python refuses to open them."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        server.settimeout(0.2)
        program = f"import socket\nsocket.socket(socket.AF_UNIX).connect({path!r})"
        assert run_program(program, LIMITS).outcome == "failed"
        with pytest.raises(TimeoutError):
            server.accept()


def test_processes_end_with_their_program(way) -> None:
    """A fork bomb, and a child that leaves its process group: no process is left after its time limit."""
    bomb = "import os\nwhile True: os.fork()"
    leaver = "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass\nassert False"
    before = num_programs()
    assert outcome(bomb, way, SHORT)[0] in ("timed out", "failed", "ended early")
    assert outcome(leaver, way)[0] == "failed"
    deadline = time.monotonic() + 10
    # Other tests may run programs at the same time.
    while num_programs() > before:
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)


def num_programs() -> int:
    """Supervisors, and all processes that their programs have forked."""
    count = 0
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        count += any(part.endswith("results/evaluate/tasks/supervisor.py") for part in command)
    return count


def test_a_program_sees_nothing_of_this_process(way, monkeypatch) -> None:
    monkeypatch.setenv("SPECDIST_TEST_SECRET", "secret")
    assert outcome("import os, sys\nassert 'SPECDIST_TEST_SECRET' not in os.environ", way)[0] == "passed"
    assert outcome("import sys\nassert sys.stdin.read() == '' and not sys.argv[1:]", way)[0] == "passed"
    assert outcome("import os\nassert os.listdir('.') == []", way)[0] == "passed"


def test_results_are_in_order_and_equal_programs_are_run_once() -> None:
    programs = ["assert True", "assert False, 'no'", "assert True"]
    found = run_programs(programs, LIMITS, 2)
    assert [each.outcome for each in found] == ["passed", "failed", "passed"]
    assert found[0] is found[2]


def test_limits_too_small_for_any_program_are_refused() -> None:
    assert "audit hook" in check_sandbox(LIMITS)
    with pytest.raises(UserError, match="a program of a few imports did not finish within"):
        check_sandbox(Limits(wall_s=1e-9))
