"""Runs with keys and values in 8 bits: a draft changes no row, and what they are is said and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job.launching import read_output, refused, run_here
from tests.job.ranks import fork_ranks


@pytest.mark.ranks
def test_a_draft_and_ranks_change_no_row_and_the_cache_is_named(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A draft beside the target, and a target alone over two ranks, each of which has scales of its heads."""
    options = options | {"limit": 8, "cache_dtype": "float8"}
    outputs = {policy: tmp_path / policy for policy in ("fixed", "none")}
    rows = []
    for policy, output in outputs.items():
        own = options if policy == "fixed" else options | {"policy": "none", "num_draft_tokens": None}
        if policy == "none":
            ended = fork_ranks(2, **own, tp_size=2, output=output)
        else:
            ended = run_here(**own, output=output)
        assert ended.code == 0, ended.stderr
        assert (
            "exact: the completions follow the distribution of the target with a float8 cache" in ended.stderr
        )
        assert "keys and values in 8 bits: by transformers' layers" in ended.stderr
        rows.append(read_output(output).column("completion_ids").to_pylist())
    assert rows[0] == rows[1]
    manifest = json.loads((outputs["fixed"] / "manifest.json").read_text())
    assert manifest["fingerprint"]["cache_dtype"] == "float8" and manifest["info"]["up_to_rounding"] is True
    card = (outputs["fixed"] / "README.md").read_text()
    assert "keys and values were kept in float8" in card and "| cache_dtype | `float8` |" in card
    ended = run_here(**(options | {"cache_dtype": None}), output=outputs["fixed"])
    refused(ended, 'cache_dtype: "float8" in --output, (absent) now')
