"""A bar on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from specdist.job.totals import progress
from specdist.job.totals.progress import LINE_INTERVAL_S, Progress
from tests.data.samples import row_result


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    return clock


def test_a_log_file_gets_a_line_a_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Work of earlier runs and other replicas counts as done, but not for the rate."""
    with caplog.at_level(logging.INFO):
        bar = Progress(100, 10)
        bar.found(0, 30)
        for _ in range(3):
            clock.now += LINE_INTERVAL_S / 3
            bar.add(row_result(num_completion_tokens=40, num_draft_tokens=8, num_accepted_draft_tokens=2), 0)
        assert caplog.messages == ["43 of 100 rows, 2.0 tokens/s, 25% accepted, about 19 min left"]
        bar.add(row_result(), 0)
        assert len(caplog.messages) == 1, "the next one is due in a minute"
    bar.close()
