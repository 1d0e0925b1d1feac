"""Runs that a report is made of, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdist.results.report import write_report
from tests.results.report.synthetic import SyntheticRun, write_run

KINDS = {
    "plain": SyntheticRun(),
    "longer": SyntheticRun(num_draft_tokens=7, num_replicas=2),
    "lossy": SyntheticRun(is_exact=False, num_draft_tokens=8, num_error_rows=2, world_size=1),
    "unfinished": SyntheticRun(num_finished=2),
    "alone": SyntheticRun(has_draft=False, world_size=1),
    "failed": SyntheticRun(num_error_rows=6),
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs by their kind, only to be read."""
    folder = tmp_path_factory.mktemp("runs")
    return {kind: write_run(folder / kind, run) for kind, run in KINDS.items()}


class Pages(dict[str, Path]):
    """Reports of single runs by their kind, and of all of them as ``several``; each is made once."""

    def __init__(self, runs: dict[str, Path], folder: Path) -> None:
        super().__init__()
        self._runs, self._folder = runs, folder

    def __missing__(self, kind: str) -> Path:
        shown = list(self._runs.values()) if kind == "several" else [self._runs[kind]]
        self[kind] = write_report(shown, folder=self._folder / kind).page
        return self[kind]


@pytest.fixture(scope="session")
def pages(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(runs, tmp_path_factory.mktemp("pages"))
