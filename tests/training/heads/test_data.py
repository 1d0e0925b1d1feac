"""Reading a collection, and keeping rows of it out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specdist.training.heads.data import open_examples, split_rows
from specdist.utils.errors import UserError
from tests.training.heads.synthetic import DIRECTION, HIDDEN_SIZE, write_collection


def test_hidden_states_belong_to_their_columns(tmp_path: Path) -> None:
    """Whatever rows are taken, in whatever order."""
    examples = open_examples(str(write_collection(tmp_path / "data")), "acceptance")
    assert len(examples) == 60
    for chosen in (examples, examples.select(np.array([41, 3, 17]))):
        hidden = chosen.hidden_states(slice(None)).astype(float)
        assert hidden.shape == (chosen.num_examples, HIDDEN_SIZE)
        expected = 1 / (1 + np.exp(-hidden @ DIRECTION))
        np.testing.assert_allclose(chosen.column("acceptance"), expected, rtol=1e-5)
    chosen = examples.select(np.array([41, 3, 17]))
    assert list(dict.fromkeys(chosen.column("row_id").tolist())) == [41, 3, 17]
    assert set(chosen.column("row_id", slice(1, 2)).tolist()) == {3}
    assert len(chosen.hidden_states(slice(1, 2))) == len(chosen.column("row_id", slice(1, 2)))


def test_whole_rows_are_kept_out_the_same_every_time(tmp_path: Path) -> None:
    examples = open_examples(str(write_collection(tmp_path / "data")), "acceptance")
    training, evaluation = split_rows(examples, 0.25, seed=3)
    assert len(training) == 45 and len(evaluation) == 15
    assert not set(training.column("row_id").tolist()) & set(evaluation.column("row_id").tolist())
    assert training.num_examples + evaluation.num_examples == examples.num_examples
    again = split_rows(examples, 0.25, seed=3)
    assert again[1].row_ids.tolist() == evaluation.row_ids.tolist()
    assert split_rows(examples, 0.25, seed=4)[1].row_ids.tolist() != evaluation.row_ids.tolist()
    # More rows of the same hashes: a larger share keeps out the same ones, and others.
    assert set(split_rows(examples, 0.5, seed=3)[1].row_ids) > set(evaluation.row_ids)


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    verifier = write_collection(tmp_path / "verifier", "verifier")
    with pytest.raises(UserError, match="a collection of kind verifier, but --kind is acceptance"):
        open_examples(str(verifier), "acceptance")
    with pytest.raises(UserError, match="has no manifest"):
        open_examples(str(tmp_path / "nowhere"), "acceptance")
    half = write_collection(tmp_path / "half", num_missing_shards=2)
    with pytest.raises(UserError, match="2 of 9 shards are missing"):
        open_examples(str(half), "acceptance")
    two = open_examples(str(write_collection(tmp_path / "two", num_rows=2)), "acceptance")
    with pytest.raises(UserError, match="leaves 2 for training and 0 for evaluation"):
        split_rows(two, 0.1, seed=0)
    assert [len(part) for part in split_rows(two, 0.4, seed=0)] == [1, 1]
