"""A tiny pair and one finished run of it, only to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.job.launching import run_here
from tests.job.pair import Pair


@pytest.fixture(scope="session")
def options(pair: Pair) -> dict[str, Any]:
    """A run of three shards, but for its output, and a training of a few steps."""
    return pair.job(max_new_tokens=16, rows_per_shard=8, temperature=0.8, num_samples=4, top_k=24)


@pytest.fixture(scope="session")
def finished(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rejection, and with log-probabilities."""
    output = tmp_path_factory.mktemp("finished") / "run"
    assert run_here(**options, output=output, logprobs=320).code == 0
    return output
