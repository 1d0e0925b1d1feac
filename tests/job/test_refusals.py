"""Options and prompts that cannot work are refused before a model is loaded: exit code 2, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.job.launching import refused, run_here
from tests.job.pair import save, train_tokenizer
from tests.job.ranks import fork_ranks


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"bogus": 3}, ["--bogus is not an option"]),
        ({"tp_size": 2}, ["1 rank was", "--tp_size 2", "needs 3", "--num_processes 3"]),
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


def test_a_foreign_output_folder_is_refused(options: dict[str, Any], no_models: None, tmp_path: Path) -> None:
    """--output is deleted by --overwrite only where a run wrote it."""
    (tmp_path / "thesis.tex").write_text("precious")
    for overwrite in (None, True):
        ended = run_here(**options, output=tmp_path, overwrite=overwrite)
        refused(ended, f"--output {tmp_path}", "thesis.tex", "give a new folder")
    assert (tmp_path / "thesis.tex").read_text() == "precious"


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


def unimplemented_draft(folder: Path) -> Path:
    """A family with two attentions in a layer, which is only seen once the model runs."""
    config = AutoConfig.for_model(
        "diffllama",
        vocab_size=320,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return save(folder, AutoModelForCausalLM.from_config(config).float(), train_tokenizer())


@pytest.mark.ranks
@pytest.mark.parametrize("finder", ["lead", "draft"])
def test_an_error_of_one_rank_ends_all_and_is_shown_once(
    options: dict[str, Any], tmp_path: Path, finder: str
) -> None:
    """Rank 0 alone reads the prompts, the draft's rank alone its model: the others must not wait for them,
    and the user must see what it was."""
    if finder == "lead":
        changes, message = {"prompt_column": "text"}, "--prompt_column text is not a column"
    else:
        draft = unimplemented_draft(tmp_path / "draft")
        changes, message = {"draft": draft}, "family diffllama, whose attention specdist does not implement"
    ended = fork_ranks(2, **(options | changes), output=tmp_path / "run")
    assert ended.code != 0
    assert ended.stderr.count(message) == 1
    assert ended.stdout == ""
    assert "UserError" not in ended.stderr
