"""The last five lines of a run, and the command that resumes a stopped one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.shard import Stats
from specdist.job.recording.check import record_check
from specdist.job.totals.closing import CHECK, closing_lines
from specdist.job.totals.report import total_stats
from specdist.models.passes.all_reduce import SUMS
from specdist.models.start_check.loading_check import LoadingCheck
from tests.data.samples import row_result
from tests.finished_runs import manifest_with, shard_stats, write_run
from tests.job.launching import Ended

EXACT = "exact: the completions follow the target's own distribution"
LABELS = ["rows", "errors", "speed", "acceptance", "output"]


def lines_of(folder: RunFolder) -> dict[str, str]:
    lines = closing_lines(folder, total_stats(folder), num_devices=3)
    assert [line.split()[0] for line in lines] == LABELS
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_the_last_lines_of_a_complete_run(tmp_path: Path) -> None:
    path = tmp_path / "my run"
    lines = lines_of(write_run(path))
    assert lines["rows"] == "14 of 14, in 3 finished shards"
    assert lines["errors"] == "none"
    assert lines["speed"] == "5.0 tokens/s, 1.7 per device; 30 tokens"
    assert lines["acceptance"] == "25.0% of the draft tokens, 2.00 tokens per speculative step; " + EXACT
    assert lines["output"] == f"{path}; python jobs/show.py '{path}'"


def test_a_stopped_run_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", (0,))
    for generation, rows in ((0, (3, 4)), (2, (4, 5))):
        with folder.parts(1, generation) as log:
            for row in rows:
                log.append(row_result(row, 0))
            log.snapshot(shard_stats(1 + generation // 2).to_json())
    lines = lines_of(folder)
    assert lines["rows"] == ("9 of 14 are kept: 6 in finished shards, 3 in unfinished shards")
    assert lines["speed"] == "5.0 tokens/s, 1.7 per device; 20 tokens", "of both, with the latest statistics"
    assert lines["acceptance"].startswith("25.0% of the draft tokens")
    assert lines["output"].startswith(f"{folder.path}; to resume, start the same command")


def test_a_run_says_why_nothing_was_drafted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", (), manifest_with(policy="none"))
    total = Stats(num_rows=1, num_completions=1, num_completion_tokens=5, wall_ns=10**9)
    reasons = {"{}": "no --draft was given", "draft: small": "--policy none uses no draft"}
    for options, reason in reasons.items():
        folder.config_path.write_text(options)
        assert f"nothing was drafted: {reason}; exact" in closing_lines(folder, total, num_devices=1)[3]


def test_a_run_keeps_the_sums_of_its_first_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ())
    manifest = folder.manifest
    info = {name: value for name, value in manifest.info.items() if name != CHECK}
    replace(manifest, info=info).write(folder.manifest_path)
    run: Any = SimpleNamespace(folder=folder, membership=SimpleNamespace(setup=contextlib.nullcontext))
    config: Any = SimpleNamespace(is_exact=True, seed=0)
    for sums in ([(4096, "one-shot")], [(8192, "all-reduce")]):
        assert record_check(config, run, LoadingCheck(), {SUMS: sums})
        assert RunFolder(folder.path).manifest.info[SUMS] == [[4096, "one-shot"]]


def test_a_job_ends_with_its_five_lines(greedy: tuple[Path, Ended]) -> None:
    """The document stays the last line of stdout, which has no other."""
    ended = greedy[1]
    said = [line.split("] ", 1)[1].split()[0] for line in ended.stderr.splitlines()[-5:]]
    assert said == LABELS
    assert len(ended.stdout.splitlines()) == 1
