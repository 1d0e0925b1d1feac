"""A line a minute in a log."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from specdist.job.totals import progress
from specdist.job.totals.progress import LINE_INTERVAL_S, Progress
from tests.data.samples import row_result


def test_a_log_file_gets_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Work of earlier runs and other replicas counts as done, but not for the rate."""
    now = 1000.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with caplog.at_level(logging.INFO):
        bar = Progress(100, 10)
        bar.found(0, 30)
        for _ in range(3):
            now += LINE_INTERVAL_S / 3
            bar.add(row_result(num_completion_tokens=40, num_draft_tokens=8, num_accepted_draft_tokens=2), 0)
        assert caplog.messages == ["43 of 100 rows, 2.0 tokens/s, 25% accepted, about 19 min left"]
        bar.add(row_result(), 0)
        assert len(caplog.messages) == 1, "the next one is due in a minute"
    bar.close()
