"""One collection of each kind in this process, only to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdist.cli import collect as main
from tests.job.launching import run_here
from tests.job.pair import Pair

FILTERED = {"temperature": 0.9, "top_k": 24, "top_p": 0.95}


@pytest.fixture(scope="session")
def options(pair: Pair) -> dict[str, Any]:
    """A collection of three shards, but for its kind and its output."""
    return pair.job(max_new_tokens=24, rows_per_shard=10, **FILTERED)


@pytest.fixture(scope="session")
def acceptance(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("acceptance") / "data"
    assert run_here(main, **options, kind="acceptance", output=output).totals["num_rows"] == 24
    return output


@pytest.fixture(scope="session")
def verifier(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("verifier") / "data"
    assert run_here(main, **options, kind="verifier", output=output).totals["num_rows"] == 24
    return output
