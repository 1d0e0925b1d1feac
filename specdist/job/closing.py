"""The last lines of a run, for people: what is done, how it went, and what to do next."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import psutil

from specdist.data import RunFolder
from specdist.job.launcher import find_launcher
from specdist.stats.shard import Stats

SHOW, STATUS = "python jobs/show.py", "python jobs/status.py"


def closing_lines(folder: RunFolder, total: Stats, *, num_devices: int, exactness: str) -> list[str]:
    """Five lines. ``exactness``: what the run may say of it, in a few words."""
    plan, num_samples = folder.plan()
    missing = folder.missing_shards()
    num_expected = plan.num_rows * num_samples
    bounds = [plan.bounds(shard) for shard in missing]
    num_finished = num_expected - num_samples * sum(end - first for first, end in bounds)
    rows = f"{num_finished:,} of {num_expected:,}, in {plan.num_shards - len(missing)} finished shards"
    following = f"{SHOW} {shlex.quote(str(folder.path))}"
    if missing:
        num_kept = sum(
            count_kept_rows(folder, shard) for shard in {*missing}.intersection(folder.begun_shards())
        )
        rows = f"{num_finished + num_kept:,} of {num_expected:,} are kept: {num_finished:,} in finished "
        rows += f"shards, {num_kept:,} in unfinished shards"
        following = f"to resume: {relaunch_command()}"
    figures = total.summary(num_devices)
    return [
        f"rows        {rows}",
        f"errors      {_errors(folder, total)}",
        f"speed       {_speed(figures['tokens_per_s'], figures['tokens_per_s_per_device'], total)}",
        f"acceptance  {_acceptance(figures['draft_acceptance_rate'], figures['mean_acceptance_length'])}; "
        f"{exactness}",
        f"output      {folder.path}; {following}",
    ]


def _errors(folder: RunFolder, total: Stats) -> str:
    if not total.num_error_rows:
        return "none"
    return (
        f"{total.num_error_rows} of {total.num_rows} rows have an error instead of a completion; "
        f"{STATUS} {shlex.quote(str(folder.path))} says why"
    )


def _speed(tokens_per_s: float | None, per_device: float | None, total: Stats) -> str:
    if tokens_per_s is None or per_device is None:
        return "nothing was generated"
    return (
        f"{tokens_per_s:,.1f} tokens/s, {per_device:,.1f} per device; {total.num_completion_tokens:,} tokens"
    )


def _acceptance(rate: float | None, length: float | None) -> str:
    if rate is None or length is None:
        return "nothing was drafted"
    return f"{rate:.1%} of the draft tokens, {length:.2f} tokens per speculative step"


def count_kept_rows(folder: RunFolder, shard: int) -> int:
    """Finished rows of an unfinished shard."""
    return len(folder.part_rows(shard))


def relaunch_command() -> str:
    """What was typed to start this job, as far as its processes can tell."""
    if "SLURM_JOB_ID" in os.environ:
        return "submit the same job again"
    words = list(sys.orig_argv)
    launcher = find_launcher()
    if launcher is not None:
        try:
            launched = psutil.Process(launcher).cmdline()
        except psutil.Error:
            return "start the same command again"
        # Whoever has its variables may have been started by something else.
        given = sys.argv[1:]
        if launched[len(launched) - len(given) :] == given:
            words = launched
    # A console command is a script that its interpreter runs.
    if len(words) > 1 and not words[1].startswith("-") and not words[1].endswith(".py"):
        words = [Path(words[1]).name, *words[2:]]
    return shlex.join(words)
