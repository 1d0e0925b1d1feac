"""Runs the job: in this process, in one of its own, or as the ranks of ``accelerate launch``."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.ipc

from specdist.cli import Command, generate
from specdist.config.generate import GenerateConfig, parse_generate_config
from tests.ranks import REPOSITORY

JOB = REPOSITORY / "jobs" / "generate.py"
ACCELERATE_CONFIG = REPOSITORY / "jobs" / "accelerate" / "cpu.yaml"
TIMEOUT_S = 200
Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a job."""

    code: int
    stdout: str
    stderr: str

    @property
    def totals(self) -> dict[str, Any]:
        """The JSON document in the last line of stdout."""
        assert self.code == 0, self.stderr
        totals: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return totals


def arguments(**options: Any) -> list[str]:
    """``--name value ...`` for every option that is not None; True stands for a bare flag."""
    found = []
    for name, value in options.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not None:
            found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return found


def job_arguments(main: Main, options: dict[str, Any]) -> list[str]:
    """Runs of the main job draft a fixed number of tokens synchronously unless they say otherwise: their
    tokens and counts are then known. What the defaults do has tests of its own."""
    is_generate = main is generate or not isinstance(main, Command)
    if is_generate and options.get("draft") is not None and "config" not in options:
        options = {"policy": "fixed", "overlap": "synchronous"} | options  # None is the job's default
    return arguments(**options)


def parse(**options: Any) -> GenerateConfig:
    return parse_generate_config(job_arguments(generate, options))


def run_here(main: Main = generate, **options: Any) -> Ended:
    """One rank in this process, which saves the seconds of importing the libraries."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code = main(job_arguments(main, options))
        except SystemExit as end:  # argparse exits this way
            code = int(end.code or 0)
    return Ended(code, stdout.getvalue(), stderr.getvalue())


def command(num_ranks: int = 1, job: Path = JOB, **options: Any) -> list[str]:
    """The command line as users type it: through accelerate where there are several ranks."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE_CONFIG)]
    launcher += ["--num_processes", str(num_ranks)]
    is_generate = job == JOB or job.parent != JOB.parent
    words = job_arguments(generate, options) if is_generate else arguments(**options)
    return [sys.executable, *(launcher if num_ranks > 1 else []), str(job), *words]


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all that it started: accelerate's ranks are in sessions of their own."""
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    family = [parent, *parent.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def refused(ended: Ended, *fragments: object) -> str:
    """The message of a refusal; it must contain all fragments, with nothing on stdout and no traceback."""
    assert ended.code == 2, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    message = ended.stderr.split("error: ", 1)[1]
    for fragment in fragments:
        assert str(fragment) in message
    return message


def shard_files(output: Path) -> list[Path]:
    return sorted((output / "shards").rglob("*.arrow"))


def shard_bytes(output: Path) -> dict[str, bytes]:
    """Content of every shard's Arrow file, by name."""
    return {path.name: path.read_bytes() for path in shard_files(output)}


def read_output(output: Path) -> pa.Table:
    """All rows of a run, in the order of its files."""
    return pa.concat_tables(
        pa.ipc.open_file(pa.BufferReader(content)).read_all() for content in shard_bytes(output).values()
    )


def shard_stats(output: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((output / "stats").rglob("shard-*.json"))]


def logged_rows(output: Path, shard: int) -> bytes:
    """The complete lines of rows in the part logs of a shard, one holder after the other."""
    lines: list[bytes] = []
    for path in part_logs(output, shard):
        with contextlib.suppress(FileNotFoundError):
            lines += path.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if b'"row":' in line and line.endswith(b"\n"))


def part_logs(output: Path, shard: int) -> list[Path]:
    """Of a shard, oldest first."""
    return sorted((output / "parts").glob(f"shard-{shard:05d}*.jsonl"), key=lambda path: path.suffixes)
