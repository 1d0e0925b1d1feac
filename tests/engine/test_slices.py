"""A target whose ranks hold a slice of the vocabulary each decides as a whole one does."""

from pathlib import Path

import pytest

from tests.models.families import tiny_model
from tests.ranks import run_ranks


@pytest.mark.ranks
def test_verdicts_of_three_ranks_are_those_of_one() -> None:
    """Uneven slices, every setting, and the bytes that cross between the ranks."""
    run_ranks("tests.engine.vocab_parallel_verify", 3)


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_generate_what_one_does(tmp_path: Path) -> None:
    tiny_model("llama", seed=3).save_pretrained(tmp_path)
    run_ranks("tests.engine.sharded_replica", 2, str(tmp_path))
