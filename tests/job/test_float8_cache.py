"""Runs with keys and values in 8 bits: a draft changes no row, and what they are is said and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.job.launching import read_output, refused, run_here


def test_a_draft_changes_no_row_and_the_cache_is_named(options: dict[str, Any], tmp_path: Path) -> None:
    options = options | {"limit": 8, "cache_dtype": "float8"}
    output = tmp_path / "run"
    ended = run_here(**options, output=output)
    assert ended.code == 0, ended.stderr
    assert "exact: the completions follow the distribution of the target with a float8 cache" in ended.stderr
    assert "keys and values in 8 bits: by transformers' layers" in ended.stderr
    assert run_here(**(options | {"draft": None}), output=tmp_path / "alone").code == 0
    assert read_output(output)["completion_ids"] == read_output(tmp_path / "alone")["completion_ids"]
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["fingerprint"]["cache_dtype"] == "float8" and manifest["info"]["up_to_rounding"] is True
    card = (output / "README.md").read_text()
    assert "keys and values were kept in float8" in card and "| cache_dtype | `float8` |" in card
    ended = run_here(**(options | {"cache_dtype": None}), output=output)
    refused(ended, 'cache_dtype: "float8" in --output, (absent) now')
