"""A target whose ranks hold a slice of the vocabulary each decides as a whole one does."""

from pathlib import Path

import pytest

from tests.engine.test_law import small_pair
from tests.models.families import tiny_model
from tests.ranks import run_ranks


@pytest.mark.ranks
def test_verdicts_of_three_ranks_are_those_of_one() -> None:
    """Uneven slices, every setting, and the bytes that cross between the ranks."""
    run_ranks("tests.engine.sliced_verdicts", 3)


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_generate_what_one_does_and_follow_its_law(tmp_path: Path) -> None:
    folders = [tmp_path / "small", tmp_path / "large"]
    for model, folder in zip((small_pair()[0], tiny_model("llama", seed=3)), folders, strict=True):
        model.save_pretrained(folder)
    run_ranks("tests.engine.sliced_replica", 2, *map(str, folders))
