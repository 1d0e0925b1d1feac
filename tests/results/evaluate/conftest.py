"""A run of the tiny pair over prompts with all the columns that a task may need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.job.launching import run_here
from tests.job.pair import Pair, build_pair, some_texts, write_arrow
from tests.results.evaluate.harness_tasks import write_tasks

NUM_ROWS = 6


@dataclass(frozen=True)
class Generated:
    """The pair, and in ``folder`` two greedy runs: ``runs/mine`` and ``runs/target-only``."""

    pair: Pair
    folder: Path

    @property
    def mine(self) -> Path:
        return self.folder / "runs" / "mine"


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    folder = tmp_path_factory.mktemp("generated")
    pair = build_pair(folder / "pair")
    prompts = write_arrow(
        folder / "prompts.arrow",
        {
            "prompt": [f"def answer_{row}(): # {text}\n" for row, text in enumerate(some_texts(NUM_ROWS))],
            "reference": [f"#### {row}" for row in range(NUM_ROWS)],
            "answer": ["B"] * NUM_ROWS,
            "options": [["red", "blue"]] * NUM_ROWS,
            "test": ["def check(candidate):\n    assert candidate() == 1\n"] * NUM_ROWS,
            "entry_point": [f"answer_{row}" for row in range(NUM_ROWS)],
        },
    )
    options: dict[str, Any] = {
        "prompts": prompts, "target": pair.target, "device": "cpu", "temperature": 0,
        "max_new_tokens": 12, "rows_per_shard": 4,
    }  # fmt: skip
    for name, more in (
        ("mine", {"draft": pair.draft, "num_samples": 2}),
        ("target-only", {"policy": "none"}),
    ):
        ended = run_here(**options, **more, output=folder / "runs" / name)
        assert ended.code == 0, ended.stderr
    return Generated(pair, folder)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks for lm-evaluation-harness, on a local data set."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return write_tasks(tmp_path / "tasks")
