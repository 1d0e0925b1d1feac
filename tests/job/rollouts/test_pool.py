"""Processes that call a user's function: whatever it does, each call is answered and no process stays."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdist.job.rollouts.pool import RolloutPool, check_function
from specdist.rollout import Answer
from specdist.utils.errors import UserError
from specdist.utils.host import process_state
from tests.ranks import REPOSITORY

FILE = Path(__file__).with_name("functions.py")
TALK = [{"role": "assistant", "content": "hello"}]


@pytest.fixture(scope="module")
def pool() -> Iterator[RolloutPool]:
    """One for all tests that leave it empty."""
    pool = RolloutPool(f"{FILE}:check", num_workers=2, timeout_s=2.0)
    yield pool
    pool.close()


def answers_of(pool: RolloutPool, *rows: dict[str, Any]) -> list[Answer]:
    for key, row in enumerate(rows):
        pool.submit(key, row, TALK)
    found: dict[Any, Answer] = {}
    ends = time.monotonic() + 60
    while pool.num_waiting and time.monotonic() < ends:
        found |= {key: answer for key, answer, _ in pool.poll(5.0)}
    return [found[key] for key in range(len(rows))]


def is_gone(pid: int) -> bool:
    state = process_state(pid)
    return state is None or state[0] in "ZX"


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_whatever_a_function_does_is_an_answer(pool: RolloutPool) -> None:
    """An exception in this process, a call without an answer, or the answer of another row."""
    kinds = ["raise", "sys.exit", "os._exit", "crash", "hang", "text", "fine"]
    *failed, fine = answers_of(pool, *({"what": what} for what in kinds))
    assert {answer.kind for answer in failed} == {"error"} and fine.kind == "accept"
    line = 1 + FILE.read_text().splitlines().index('        return rollout.accept(score=float("nan"))')
    reasons = [answer.reason for answer in failed]
    assert reasons[0].startswith("ValueError: score is nan") and reasons[0].endswith(f"{FILE}, line {line})")
    assert reasons[1].startswith("SystemExit: 4")
    assert reasons[2] == "the rollout function ended its process: exit code 3"
    assert reasons[3].startswith("the rollout function ended its process: signal 11")
    assert reasons[4] == "the rollout function took longer than 2 s (--rollout_timeout)"
    assert reasons[5] == "it returned 'hello', which no function of specdist.rollout returns"
    assert fine.columns["gpus"] == ""


def test_processes_stay_and_signals_of_the_job_are_not_for_them(pool: RolloutPool) -> None:
    """A start for each call; a call that fails since Slurm asks the whole job to stop."""
    answers = answers_of(pool, *({"what": what} for what in ("fine", "signals") * 4))
    assert {answer.kind for answer in answers} == {"accept"}
    assert len({answer.columns["pid"] for answer in answers}) <= 2


def test_rows_larger_than_a_pipe_do_not_wait(pool: RolloutPool, tmp_path: Path) -> None:
    """Both ends that write to each other, or a submit that waits for a module's long import."""
    big = {"what": "fine", "big": "x" * 2_000_000}
    assert [answer.columns["big"] for answer in answers_of(pool, big, big, big)] == [big["big"]] * 3
    slow = tmp_path / "slow.py"
    slow.write_text(f"import time; time.sleep(1)\n{FILE.read_text()}")
    other = RolloutPool(f"{slow}:check", num_workers=1, timeout_s=2.0)
    begun = time.monotonic()
    other.submit("a", big, TALK)
    other.submit("b", {"what": lambda: 1}, TALK)
    (unsent,) = other.poll()
    assert time.monotonic() - begun < 0.9
    assert unsent[0] == "b" and "cannot be sent to a process" in unsent[1].reason
    ((key, answer, seconds),) = other.poll(60.0)
    assert key == "a" and answer.kind == "accept" and 0 < seconds < 1
    assert other.num_waiting == 0 and other.poll(60.0) == [] and time.monotonic() - begun < 50
    other.close()


def test_coroutines_are_awaited() -> None:
    """An ``async def`` whose coroutine is taken for its answer."""
    pool = RolloutPool("tests.job.rollouts.functions:wait", num_workers=1, timeout_s=30.0)
    answers = answers_of(pool, {"what": "a"}, {"what": "b"})
    pool.close()
    assert [answer.messages[0]["content"] for answer in answers] == ["a hello", "b hello"]


def test_close_ends_what_hangs_and_what_it_started(tmp_path: Path) -> None:
    """A job that stays after its end, or a child of the function that does."""
    pool, pids = RolloutPool(f"{FILE}:check", num_workers=1, timeout_s=300.0), tmp_path / "pids"
    for key in range(3):
        pool.submit(key, {"what": "hang", "pids": pids}, TALK)
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < 20
    until(lambda: all(is_gone(int(pid)) for pid in pids.read_text().split()))


def test_a_killed_run_leaves_no_worker(tmp_path: Path) -> None:
    """One that hangs in the function for ever; and the run's stdout has no line of the user's module."""
    pids = tmp_path / "pids"
    script = (
        "import pathlib, time\nfrom specdist.job.rollouts.pool import RolloutPool\n"
        f"pool = RolloutPool('{FILE}:check', num_workers=1, timeout_s=300)\n"
        f"pool.submit(0, {{'what': 'hang', 'pids': pathlib.Path('{pids}')}}, [])\ntime.sleep(300)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    run.kill()
    worker, child = map(int, pids.read_text().split())
    until(lambda: is_gone(worker))
    os.kill(child, signal.SIGKILL)
    stdout, stderr = run.communicate()
    assert stdout == b"" and b"a line of the module" in stderr


def test_a_module_that_can_be_imported_once_gives_errors(tmp_path: Path) -> None:
    """Processes that are started for ever; a refusal of the import that nobody sees."""
    once = tmp_path / "once.py"
    once.write_text(
        "import os, pathlib\nmark = pathlib.Path(__file__).with_suffix('.mark')\n"
        "os._exit(5) if mark.exists() else mark.touch()\n\ndef check(row, messages):\n    os._exit(6)\n"
    )
    pool = RolloutPool(f"{once}:check", num_workers=1, timeout_s=30.0)
    reasons = [answer.reason for answer in answers_of(pool, {}, {}, {})]
    pool.close()
    second = "its import ended its process: exit code 5"
    assert reasons == ["the rollout function ended its process: exit code 6", second, second]


def test_a_function_that_cannot_be_called_is_refused(tmp_path: Path) -> None:
    """After minutes of loading, or by an error for every row. One that can is known by its file."""
    assert check_function(f"{FILE}:check") == hashlib.sha256(FILE.read_bytes()).hexdigest()
    broken = tmp_path / "broken.py"
    broken.write_text("import json\nother = 1\ndef check(row):\n    pass\njson.loads('{')\n")
    sound = tmp_path / "json.py"
    sound.write_text("other = 1\ndef check(row):\n    pass\n")
    for function, words in {
        "check": "it names no function", ":check": "it names no function", "a:": "it names no function",
        f"{tmp_path}/none.py:check": f"there is no file {tmp_path}/none.py",
        "no_such:check": "its import failed: ModuleNotFoundError: No module named 'no_such'",
        f"{broken}:check": f"its import failed: JSONDecodeError: .* \\({broken}, line 5\\)",
        f"{sound}:chek": "json has no function chek of",
        f"{sound}:other": "no function other of .*: 1 is not a callable object",
        f"{sound}:check": "no function check of .*: too many positional arguments",
    }.items():  # fmt: skip
        with pytest.raises(
            UserError, match=f"^--rollout {function}: .*{words}.*; name path/file.py:function, or"
        ):
            check_function(function)
