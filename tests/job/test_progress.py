"""A line a minute in a log; on a terminal a bar, and seven lines before it."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdist.cli import generate
from specdist.job.totals import progress
from specdist.job.totals.progress import LINE_INTERVAL_S, Progress
from tests.data.samples import row_result
from tests.job.launching import job_arguments


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


@pytest.mark.parametrize("is_verbose", [False, True])
def test_a_terminal_gets_seven_lines_before_the_bar_and_the_log_has_all(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_verbose: bool
) -> None:
    """A line that the summary leaves out would be nowhere: some are logged before there is a file."""
    of_run = {"output": tmp_path, "policy": "goodput", "verbose": is_verbose or None}
    with contextlib.redirect_stderr(io.StringIO()) as shown, contextlib.redirect_stdout(io.StringIO()):
        monkeypatch.setattr(shown, "isatty", lambda: True)
        assert generate(job_arguments(generate, {**options, **of_run})) == 0
    start, bar = shown.getvalue().split("  0%|", 1)
    lines = [line.rstrip("\r ").split("\r")[-1] for line in start.split("\n")]
    assert (len([line for line in lines if line.strip()]) <= 7) == (not is_verbose)
    [log] = (tmp_path / "logs").iterdir()
    for label in ("logs  ", "models  ", "promise  ", "costs  ", "work  ", "prompt      row 0, "):
        assert label in start and label in log.read_text()
    assert "24 of 24 rows, " in bar and "output  " in bar.splitlines()[-1]
    assert ("target matches" in start, "target matches" in log.read_text()) == (is_verbose, True)
