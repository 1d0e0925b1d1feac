"""What a real run leaves for its report: every pass with size and time, and a page with its figures."""

from __future__ import annotations

import json
import time
from pathlib import Path

from specdist.data.run.run_folder import RunFolder
from specdist.job.totals.report import total_stats
from specdist.results.report import write_report
from tests.job.launching import Ended


def check_passes(output: Path) -> None:
    """Every pass is there, with its size and its time."""
    total = total_stats(RunFolder(output))
    assert sum(total.num_target_passes_per_size.values()) == total.num_target_passes > 0
    assert sum(total.num_draft_passes_per_size.values()) == total.num_draft_passes > 0
    assert sum(total.target_pass_ns_per_size.values()) == total.target_ns.prefill + total.target_ns.verify


def test_every_pass_is_counted(greedy: tuple[Path, Ended]) -> None:
    check_passes(greedy[0])


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
    assert f">{ended.totals['draft_acceptance_rate']:,.4g}<" in page
    assert page.count("<img") == 6
    assert "every row has a completion" in page
