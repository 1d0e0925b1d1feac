"""Theory and measurement at the end of a run: fields that add up, and a readable table."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specdist.data.run.run_folder import RunFolder
from specdist.job.costs.pass_times import PassTimer, draw_from_logits
from specdist.job.costs.round_times import NO_HOST
from specdist.job.totals.predictions import predictions_of
from specdist.job.totals.report import comparison_lines, total_stats
from specdist.policies.costs import CostModel
from specdist.results.report import write_report
from tests.job.launching import Ended, run_here
from tests.job.ranks import fork_ranks
from tests.ranks import REPOSITORY

FORMULAS = {
    "tokens_per_row_pass", "draft_acceptance_rate", "verification_rate", "discard_rate", "wall_time_factor",
}  # fmt: skip
MS = 1_000_000
TIMES = {"target_pass_s", "draft_step_s", "rounds_s"}


def check_drift(output: Path, predictions: dict[str, Any]) -> None:
    """Every pass is there, with its size and its time, and the manifest's costs give what they say."""
    total = total_stats(RunFolder(output))
    assert sum(total.num_target_passes_per_size.values()) == total.num_target_passes > 0
    assert sum(total.num_draft_passes_per_size.values()) == total.num_draft_passes > 0
    assert sum(total.target_pass_ns_per_size.values()) == total.target_ns.prefill + total.target_ns.verify
    info = json.loads((output / "manifest.json").read_text())["info"]
    assert predictions == predictions_of(total, CostModel.from_json(info["costs"])).to_json()
    assert set(predictions["drift"]) == TIMES
    for figure in predictions["drift"].values():
        # Of the same order of magnitude, or of one that is not far.
        assert 1e-3 < figure["ratio"] < 1e3
    assert 0 < predictions["target_share_in_curve"] <= 1


def test_the_document_and_the_folder_say_the_same(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under costs with which drafting pays: the pair's two models are equally large."""

    def pass_ns(timer: PassTimer, num_rows: int, num_tokens: int, num_context_tokens: int) -> int:
        assert num_context_tokens > 0
        is_draft = timer._finish.func is draw_from_logits  # type: ignore[attr-defined]
        return 20_000 if is_draft else 2 * MS

    monkeypatch.setattr(PassTimer, "__call__", pass_ns)
    monkeypatch.setattr("specdist.job.costs.measuring.host_times", lambda *_: NO_HOST)
    output = tmp_path / "run"
    ended = run_here(**options, policy="goodput", output=output)
    predictions = ended.totals["predictions"]
    assert set(predictions["theory"]) == FORMULAS
    check_drift(output, predictions)
    shown = show(output)
    for line in ("theory and measurement", "frozen costs beside this run", "time per pass, timed"):
        assert line in shown and line not in ended.stderr
    # Nothing is left to do; the same is said again.
    assert run_here(**options, policy="goodput", output=output).totals["predictions"] == predictions


def show(output: Path) -> str:
    ended = subprocess.run(
        [sys.executable, str(REPOSITORY / "jobs" / "show.py"), str(output), "--theory"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return ended.stdout


def test_without_frozen_costs_nothing_drifts(greedy: tuple[Path, Ended]) -> None:
    output, ended = greedy
    predictions = ended.totals["predictions"]
    assert not predictions["drift"] and predictions["target_share_in_curve"] is None
    # A noisy copy of its target, of which tokens are accepted about alike everywhere.
    figure = predictions["theory"]["tokens_per_row_pass"]
    assert figure["measured"] > 1.5 and 0.7 < figure["ratio"] < 1.3
    lines = comparison_lines(RunFolder(output), total_stats(RunFolder(output)))
    assert not any("frozen" in line for line in lines)
    # A table's columns are below one another.
    rows = [line for line in lines if line.startswith("  ") and ":" not in line]
    assert len(rows) == len(FORMULAS) and len({len(line) for line in rows}) == 1


def test_a_target_alone_has_nothing_to_predict(options: dict[str, Any], tmp_path: Path) -> None:
    ended = run_here(**(options | {"draft": None}), output=tmp_path / "run")
    predictions = ended.totals["predictions"]
    assert predictions["acceptance"] is None and not predictions["theory"] and not predictions["drift"]
    assert "acceptance  nothing was drafted; exact" in ended.stderr
    assert "theory and measurement" not in show(tmp_path / "run")


def test_a_page_of_a_real_run(greedy: tuple[Path, Ended], tmp_path: Path) -> None:
    """Its shards know when they were worked on, and by whom, and the page has their figures."""
    output, ended = greedy
    shards = [json.loads(path.read_text()) for path in sorted(output.glob("stats/*.json"))]
    assert len({shard["replica"] for shard in shards}) == 1 and shards[0]["replica"]
    spans = [(shard["work_span"]["begin_unix_ns"], shard["work_span"]["end_unix_ns"]) for shard in shards]
    begins, ends = zip(*spans, strict=True)
    manifest_ns = (output / "manifest.json").stat().st_mtime_ns
    assert manifest_ns < begins[0] < begins[-1] < max(ends) < time.time_ns()
    page = write_report([output], folder=tmp_path).page.read_text()
    assert f">{ended.totals['draft_acceptance_rate']:.1%}<" in page
    assert "<h2>Speed over time</h2>" in page and "no trace" in page
    assert "every row has a completion" in page


@pytest.mark.ranks
def test_drafting_ahead_is_predicted_too(options: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "run"
    ended = fork_ranks(3, **options, tp_size=2, overlap="asynchronous", num_branches=1, output=output)
    predictions = ended.totals["predictions"]
    assert set(predictions["theory"]) == FORMULAS | {"ready_rate"}
    check_drift(output, predictions)
