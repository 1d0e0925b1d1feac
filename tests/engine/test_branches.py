"""Branches: which are chosen, and where they are kept. That they are what the row would have drafted is
tested with the draft's cache."""

from typing import cast

import numpy as np
import pytest
import torch

from specdist.engine.draft.ahead.branches import Branches, BranchTable, DraftBranches
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.branch_estimates import BranchEstimates, estimate_branches, likeliest
from specdist.sampling.distributions import SamplingSettings

GREEDY = SamplingSettings(temperature=0.0)


def test_the_likeliest_misses_are_chosen() -> None:
    # Two slots with chains of two tokens and of one; per position the drawn token and two alternatives.
    branch_estimates = BranchEstimates(
        survival_N=np.array([0.5, 0.6, 0.9]),
        alternative_ids_NA=np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        chances_NA=np.array([[0, 0.3, 0.1], [0, 0.3, 0.05], [0, 0.05, 0.05]]),
    )
    table = BranchTable(num_slots=4, num_branches=2)
    is_excluded = np.zeros((3, 3), bool)
    is_excluded[2, 1] = True
    chosen = table.choose(
        np.array([3, 1]), np.array([10, 20]), np.array([2, 1]), branch_estimates, is_excluded, 2
    )
    # Slot 3: 0.3, then 0.5 x 0.3 = 0.15 before 0.1. Slot 1: its best alternative is excluded.
    assert chosen.slots_B.tolist() == [3, 3, 1]
    assert chosen.positions_B.tolist() == [10, 11, 20]
    assert chosen.token_ids_B.tolist() == [2, 5, 9]
    assert chosen.chances_B == pytest.approx([0.3, 0.5 * 0.3, 0.05])
    assert len(set(chosen.draft_slots_B.tolist())) == 3 and min(chosen.draft_slots_B) >= 4
    table.open(chosen, np.array([4, 3, 2]))
    index_B, draft_slots_B, lengths_B = table.find(np.array([1, 3]), np.array([20, 11]), np.array([8, 5]))
    assert index_B.tolist() == [1] and draft_slots_B.tolist() == [chosen.draft_slots_B[1]]
    assert lengths_B.tolist() == [3]
    num_open, num_tokens = table.sizes(np.array([3, 1, 0]))
    assert num_tokens.tolist() == [7, 2, 0] and num_open.tolist() == [2, 1, 0]
    table.drop(np.array([3]))
    assert not len(table.find(np.array([3]), np.array([11]), np.array([5]))[0])


def _estimates(scores: torch.Tensor, settings: SamplingSettings, num_alternatives: int) -> BranchEstimates:
    """Where token 1 is drawn."""
    return estimate_branches(likeliest(scores, settings, num_alternatives), np.array([1]), settings)


def test_estimates_for_a_random_draw() -> None:
    """Half of the draft's remaining mass is lost, to the other tokens in proportion to their probability."""
    distribution = torch.tensor([[0.5, 0.3, 0.2, 0.0]])
    branch_estimates = _estimates(distribution, SamplingSettings(), 3)
    assert branch_estimates.survival_N == pytest.approx([0.75])
    chances = dict(
        zip(
            branch_estimates.alternative_ids_NA[0].tolist(),
            branch_estimates.chances_NA[0].tolist(),
            strict=True,
        )
    )
    assert chances == pytest.approx({0: 0.25 * 0.5 / 0.7, 1: 0, 2: 0.25 * 0.2 / 0.7, 3: 0})


def test_estimates_for_a_greedy_draw() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    branch_estimates = _estimates(logits, GREEDY, 2)
    weights = torch.exp(2 * logits[0])
    assert branch_estimates.survival_N == pytest.approx([float(weights[1] / weights.sum())])
    assert branch_estimates.alternative_ids_NA.tolist() == [[1, 2, 0]]
    assert branch_estimates.chances_NA[0] == pytest.approx([0, *(weights[[2, 0]] / weights.sum()).tolist()])


class Cache:
    """Notes the slots whose branches it has copied."""

    def __init__(self) -> None:
        self.adopted: list[list[int]] = []
        self.cache = self

    def adopt_branches(self, branches_B: np.ndarray, slots_B: np.ndarray, *_: np.ndarray) -> None:
        self.adopted.append(slots_B.tolist())


def test_keys_of_an_adopted_branch_follow_once() -> None:
    slots = np.arange(2)
    cache, state = Cache(), DraftState(
        num_slots=2, num_branches=1, max_length=9, vocab_size=5, device=torch.device("cpu")
    )  # fmt: skip
    settings = SamplingSettings()
    branches = DraftBranches(cast(ModelRunner, cache), state, settings, None, num_branches=1)
    # Each has a branch after a token; the next token of the second sequence is that of its branch.
    branches.table.open(
        Branches(slots, slots + 2, np.full(2, 3), np.array([1, 2]), np.ones(2)),
        np.full(2, 2),
    )
    state.num_committed[:], state.token_ids[:2, 3] = 4, [0, 2]
    state.token_ids[3, 4:6] = [4, 3]
    report = branches.adopt(slots, np.zeros(2, np.int64), np.zeros(2, bool), 1)
    assert report.num_branches_R.tolist() == [1, 1] and report.num_branch_tokens_R.tolist() == [2, 0]
    assert report.is_caught_R.tolist() == [False, True]
    assert state.num_candidates.tolist() == [0, 2] and state.token_ids[1, 4:6].tolist() == [4, 3]
    assert not cache.adopted
    branches.finish()
    branches.finish()
    assert cache.adopted == [[1]]
