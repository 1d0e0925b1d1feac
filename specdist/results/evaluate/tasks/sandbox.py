"""Running programs written by a model, each in an isolated process.

:mod:`specdist.results.evaluate.tasks.supervisor` sets up the strongest isolation that the kernel grants this
user; the outcome says which one. It is not a virtual machine: a program can read all files that this user can
read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
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

SUPERVISOR = Path(__file__).with_name("supervisor.py")
# Time to start two processes on a busy machine, in addition to the program's own.
GRACE_S = 30.0
# What almost every program imports: the interpreter's files must be readable.
PROBE = "import collections, math, re, typing"
PASSED, FAILED = "passed", "failed"
OutcomeName = Literal["passed", "failed", "timed out", "ended early"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program. ``file_bytes``: of a file or, if the kernel isolates files, of all together."""

    wall_s: float = 10.0
    memory_bytes: int = 2 * 2**30
    file_bytes: int = 16 * 2**20
    num_files: int = 64


@dataclass(frozen=True)
class Outcome:
    """How a program ended. ``detail``: the exception or exit; ``isolation``: the measures in force."""

    outcome: OutcomeName
    detail: str | None
    isolation: tuple[str, ...]


def check_sandbox(limits: Limits) -> tuple[str, ...]:
    """The isolation that programs will have. Raises :class:`UserError` if a few imports cannot run."""
    if not sys.platform.startswith("linux"):
        raise UserError(f"programs are run on Linux only, and this is {sys.platform}")
    found = run_program(PROBE, limits)
    if found.outcome != PASSED:
        raise UserError(
            f"a program of a few imports did not finish within {limits.wall_s:g} s and "
            f"{limits.memory_bytes / 2**20:g} MiB ({found.outcome}: {found.detail}): raise --time_limit_s or "
            "--memory_limit_mib"
        )
    return found.isolation


def run_programs(programs: Sequence[str], limits: Limits, num_workers: int) -> list[Outcome]:
    """Run programs, ``num_workers`` at a time and equal ones once; outcomes are in the programs' order."""
    unique = list(dict.fromkeys(programs))
    with ThreadPoolExecutor(num_workers) as pool:
        running = pool.map(lambda program: run_program(program, limits), unique)
        found = list(tqdm(running, total=len(unique), unit=" programs", disable=None))
    by_program = dict(zip(unique, found, strict=True))
    return [by_program[program] for program in programs]


def run_program(
    program: str, limits: Limits, *, use_namespaces: bool = True, use_audit_hook: bool = True
) -> Outcome:
    """Run Python source, which passes if its end is reached. Raises RuntimeError if the supervisor fails."""
    spec = {
        "program": program,
        "limits": dataclasses.asdict(limits),
        "use_namespaces": use_namespaces,
        "use_audit_hook": use_audit_hook,
    }
    with tempfile.TemporaryDirectory(prefix="specdist-program-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(SUPERVISOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            answer, errors = process.communicate(json.dumps(spec).encode(), limits.wall_s + GRACE_S)
        except subprocess.TimeoutExpired:
            answer, errors = b"", b"it does not end"
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    try:
        found = json.loads(answer)
    except ValueError:
        reason = errors.decode(errors="replace")[-2000:]
        raise RuntimeError(f"the supervisor of a program has failed: {reason}") from None
    return Outcome(found["outcome"], found["detail"], tuple(found["isolation"]))


def _environment(folder: str) -> dict[str, str]:
    """A new environment: that of this process may hold keys and tokens."""
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": folder,
        "TMPDIR": folder,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
