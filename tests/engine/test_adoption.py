"""What the adoption of a branch leaves for after the reply."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from specdist.engine.draft.ahead.adoption import BranchAdoption
from specdist.engine.draft.ahead.branches import Branches, BranchTable
from specdist.engine.draft.ahead.first_ahead import FirstAhead
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.models.passes.runner import ModelRunner

SLOTS = np.arange(2)


class Cache:
    """Notes the slots whose branches it has copied."""

    def __init__(self) -> None:
        self.adopted: list[list[int]] = []

    def adopt_branches(self, branches_B: np.ndarray, slots_B: np.ndarray, *_: np.ndarray) -> None:
        self.adopted.append(slots_B.tolist())


@pytest.mark.parametrize("has_failed", [False, True])
def test_keys_follow_unless_the_request_has_failed(has_failed: bool) -> None:
    """A sequence that is opened again may have other pages."""
    cache, state = Cache(), DraftState(
        num_slots=2, num_branches=1, max_length=9, vocab_size=5, device=torch.device("cpu")
    )  # fmt: skip
    branches = BranchTable(2, 1)
    adoption = BranchAdoption(cast(ModelRunner, cache), state, branches, None)
    # Each has a branch after a token; the next token of the second sequence is that of its branch.
    branches.open(
        Branches(SLOTS, SLOTS + 2, np.full(2, 3), np.array([1, 2]), np.ones(2, np.int64), np.ones(2)),
        np.full(2, 2),
    )
    state.num_committed[:], state.token_ids[:2, 3] = 4, [0, 2]
    state.token_ids[3, 4:6] = [4, 3]
    report = adoption.adopt(SLOTS, FirstAhead.nothing(2), 1)
    assert report.num_branches_R.tolist() == [1, 1] and report.num_branch_tokens_R.tolist() == [2, 0]
    assert report.branch_ranks_R.tolist() == [0, 1]
    assert state.num_candidates.tolist() == [0, 2] and state.token_ids[1, 4:6].tolist() == [4, 3]
    assert not cache.adopted
    if has_failed:
        adoption.drop()
    adoption.finish()
    adoption.finish()
    assert cache.adopted == ([] if has_failed else [[1]])
