"""A vocabulary-parallel target gives the same verify outputs as a whole one."""

from pathlib import Path

import pytest

from tests.models.families import tiny_model
from tests.ranks import run_ranks


@pytest.mark.ranks
def test_verify_outputs_of_three_ranks_are_those_of_one() -> None:
    """Shards of unequal size, and the bytes exchanged between the ranks."""
    run_ranks("tests.engine.vocab_parallel_verify", 3)


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_generate_the_tokens_of_one(tmp_path: Path) -> None:
    folders = [str(tmp_path / family) for family in ("llama", "qwen3_5_text")]
    for folder in folders:
        tiny_model(Path(folder).name, seed=3).save_pretrained(folder)
    run_ranks("tests.engine.sharded_replica", 2, *folders)
