"""What a real run leaves for its report: a page with its figures."""

from __future__ import annotations

import json
import time
from pathlib import Path

from specdist.results.report import write_report
from tests.job.launching import Ended


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
