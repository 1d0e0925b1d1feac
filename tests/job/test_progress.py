"""A line a minute in a log; on a terminal a bar, and six lines before it."""

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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """As they stand there at the end: what a return goes back over is written over."""
        shown = [line.rstrip("\r ").split("\r")[-1] for line in self.getvalue().split("\n")]
        return [line.partition(" ")[2].removeprefix("[target+draft] ") for line in shown if line.strip()]


@pytest.mark.parametrize("is_verbose", [False, True])
def test_a_terminal_gets_six_lines_before_the_bar_and_the_log_has_all(
    options: dict[str, Any], tmp_path: Path, *, is_verbose: bool
) -> None:
    """A line that the summary leaves out would be nowhere: some are logged before there is a file."""
    words = job_arguments(
        generate, {**options, "output": tmp_path, "policy": "goodput", "verbose": is_verbose or None}
    )
    with contextlib.redirect_stderr(Terminal()) as shown, contextlib.redirect_stdout(io.StringIO()):
        assert generate(words) == 0
    start = [line for line in shown.lines if " rows" not in line]
    first = start.index(next(line for line in start if "models  " in line))
    labels = [line.split()[0] for line in start[first : first + 5]]
    assert labels == ["models", "promise", "costs", "work", "logs"] and (first <= 1) == (not is_verbose)
    assert "24 of 24 rows, " in shown.getvalue() and shown.lines[-1].startswith("output  ")
    [log] = (tmp_path / "logs").iterdir()
    logged = log.read_text()
    assert "the loaded target matches" in logged and "a pass of" in logged
    assert ("the loaded target matches" in shown.getvalue()) == is_verbose
    assert "--seed 0 fixes the tokens" in logged and "costs       measured: a pass of" in logged
