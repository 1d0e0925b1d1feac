"""Running programs written by a model, each in a process of its own (``program.py``).

It guards against what models write by mistake: programs without an end, that fill the memory, write a huge
file, start processes, connect to something, or change or delete files. It does not stop an attacker:
Python's audit hook can be evaded from within the interpreter, a program can read whatever this user can read,
the total size of many files is not limited, and for root the kernel does not limit the number of processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from specdist.utils.errors import UserError

PROGRAM = Path(__file__).with_name("program.py")
MAX_DETAIL_CHARS, NUM_FILES = 500, 64
# What almost every program imports: the interpreter's files must be readable.
PROBE = "import collections, math, re, typing"
PASSED = "passed"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program. ``file_bytes``: of each file that it writes."""

    wall_s: float = 10.0
    memory_bytes: int = 2 * 2**30
    file_bytes: int = 16 * 2**20

    def of_kernel(self) -> list[tuple[int, int]]:
        """The resources that the kernel limits, none above what this process itself may have."""
        wanted = {
            resource.RLIMIT_AS: self.memory_bytes,
            resource.RLIMIT_CPU: int(self.wall_s) + 1,
            resource.RLIMIT_FSIZE: self.file_bytes,
            resource.RLIMIT_NOFILE: NUM_FILES,
            resource.RLIMIT_NPROC: 0,
            resource.RLIMIT_CORE: 0,
        }
        own = {which: resource.getrlimit(which)[1] for which in wanted}
        return [
            (which, most if own[which] == resource.RLIM_INFINITY else min(most, own[which]))
            for which, most in wanted.items()
        ]


LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    """How a program ended. ``detail``: the last line of its error, or its exit."""

    outcome: Literal["passed", "failed", "timed out"]
    detail: str | None = None


def check_sandbox() -> None:
    """Raises :class:`UserError` if a few imports cannot run."""
    if not sys.platform.startswith("linux"):
        raise UserError(f"programs are run on Linux only, and this is {sys.platform}")
    found = run_program(PROBE)
    if found.outcome != PASSED:
        raise UserError(
            f"a program of a few imports did not finish within {LIMITS.wall_s:g} s and "
            f"{LIMITS.memory_bytes / 2**20:g} MiB ({found.outcome}: {found.detail})"
        )


def run_programs(programs: Sequence[str]) -> list[Outcome]:
    """Run programs, one per core at a time and equal ones once; outcomes are in the programs' order."""
    unique = list(dict.fromkeys(programs))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(tqdm(pool.map(run_program, unique), total=len(unique), unit=" programs", disable=None))
    by_program = dict(zip(unique, found, strict=True))
    return [by_program[program] for program in programs]


def run_program(program: str, limits: Limits = LIMITS) -> Outcome:
    """Run Python source, which passes if its end is reached. Raises RuntimeError if it cannot be started."""
    nonce = secrets.token_hex(16)
    spec = json.dumps({"program": program, "limits": limits.of_kernel(), "nonce": nonce}).encode()
    with tempfile.TemporaryDirectory(prefix="specdist-program-", ignore_cleanup_errors=True) as top:
        folder, report = Path(top, "work"), Path(top, "report")
        folder.mkdir()
        # A new environment: that of this process may hold keys and tokens.
        environment = {
            "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip
        with report.open("wb") as errors, subprocess.Popen(
            [sys.executable, "-I", "-B", str(PROGRAM)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            cwd=folder, env=environment, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                has_started, has_ended = _wait(process, spec, limits.wall_s)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        text = report.read_text(errors="replace")
    if not has_started:
        raise RuntimeError(f"a program could not be started: {text[-2000:]}")
    if text.endswith(nonce):
        return Outcome("passed")
    if not has_ended:
        return Outcome("timed out")
    code = process.returncode
    if code == 1 and text.strip():
        return Outcome("failed", text.strip().splitlines()[-1][:MAX_DETAIL_CHARS])
    return Outcome("failed", f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")


def _wait(process: subprocess.Popen[bytes], spec: bytes, wall_s: float) -> tuple[bool, bool]:
    """Whether the program begins, and whether it ends within its time after that."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(spec)
    if process.stdout.read(1) != b".":
        return False, False
    try:
        process.wait(wall_s)
    except subprocess.TimeoutExpired:
        return True, False
    return True, True
