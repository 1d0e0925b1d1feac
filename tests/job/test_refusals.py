"""Options and prompts that cannot work are refused before a model is loaded: exit code 2, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.job.launching import refused, run_here
from tests.job.ranks import fork_ranks


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"bogus": 3}, ["--bogus is not an option"]),
        ({"tp_size": 2, "device": "auto"}, ["1 rank was", "--tp_size 2", "needs 3", "--num_processes 3"]),
        ({"max_seq_len": 129}, ["--max_seq_len 129", "128", "lower it"]),
        ({"target": "no/such-model"}, ["--target no/such-model", "spelling"]),
        ({"draft": "/no/such/folder"}, ["--draft /no/such/folder", "spelling"]),
        ({"prompts": "missing.arrow"}, ["--prompts missing.arrow", "no such file"]),
    ],
)
def test_an_impossible_option_is_refused(
    options: dict[str, Any], no_models: None, tmp_path: Path, changes: dict[str, Any], fragments: list[str]
) -> None:
    """The message names the option, its value, and the rule or the remedy."""
    refused(run_here(**(options | {"output": tmp_path / "run"} | changes)), *fragments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("cache_memory", ["100KiB", "1KiB"])
def test_a_cache_too_small_for_a_row_is_refused(
    options: dict[str, Any], tmp_path: Path, cache_memory: str
) -> None:
    """One row of 128 positions needs 128 KiB for both models; the remedy is never a length of 0."""
    ended = run_here(**options, output=tmp_path / "run", cache_memory=cache_memory)
    message = refused(ended, f"--cache_memory {cache_memory}", "--max_seq_len 128", "raise --cache_memory")
    lower = "lower --max_seq_len to 96"
    assert (lower in message) == (cache_memory == "100KiB")
    if cache_memory == "100KiB":
        obeyed = run_here(**options, output=tmp_path / "new", cache_memory=cache_memory, max_seq_len=96)
        assert obeyed.code == 0


@pytest.mark.ranks
def test_an_error_of_one_rank_ends_all_and_is_shown_once(options: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 alone reads the prompts: the other must not wait for them, and the user must see what it was."""
    ended = fork_ranks(2, **(options | {"prompt_column": "text"}), output=tmp_path / "run")
    assert ended.code != 0
    assert ended.stderr.count("--prompt_column text is not a column") == 1
    assert ended.stdout == ""
    assert "UserError" not in ended.stderr
