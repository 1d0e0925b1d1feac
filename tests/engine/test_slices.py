"""A vocabulary-parallel target gives the same verify outputs as a whole one."""

import pytest

from tests.ranks import run_ranks


@pytest.mark.ranks
def test_verify_outputs_of_three_ranks_are_those_of_one() -> None:
    """Shards of unequal size, and the bytes exchanged between the ranks."""
    run_ranks("tests.engine.vocab_parallel_verify", 3)
