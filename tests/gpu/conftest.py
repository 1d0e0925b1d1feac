"""The pair of models of the main job, built once for all tests on pretended GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.job.pair import Pair, build_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def options(pair: Pair) -> dict[str, Any]:
    """Two shards of few rows. In float32 devices differ by rounding alone, which decides no token here."""
    return {
        "prompts": pair.prompts,
        "target": pair.target,
        "draft": pair.draft,
        "dtype": "float32",
        "temperature": 0,
        "policy": "fixed",
        "num_draft_tokens": 3,
        "max_new_tokens": 6,
        "max_batch_rows": 3,
        "cache_memory": "64MiB",
        "rows_per_shard": 2,
        "limit": 4,
    }
