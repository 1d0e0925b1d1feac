"""Branches: which are chosen, where they are kept, and that they are what the row would have drafted."""

from typing import cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specdist.engine.draft.ahead.branches import Branches, BranchTable, DraftBranches
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.messages.opened import OpenedSequences
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageTable
from specdist.models.passes.runner import ModelRunner
from specdist.policies import FixedLength
from specdist.policies.payoff import RoundShape
from specdist.sampling.branch_estimates import BranchEstimates, estimate_branches, likeliest
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import PAGE_SIZE, paged_runner
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import VOCAB_SIZE, tiny_model

NUM_DRAFT_TOKENS = 4
NUM_BRANCHES = 3
MAX_SEQ_LEN = 128
GREEDY = SamplingSettings(temperature=0.0)
NOTHING = np.zeros(0, np.int64)


class LoneDraft:
    """A greedy draft without a target: the test says what is accepted and which token comes next."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]]) -> None:
        self.rows = [list(prompt) for prompt in prompts]
        self.slots = np.arange(len(prompts))
        self.pages = PageTable(num_pages=256, page_size=PAGE_SIZE, num_slots=len(prompts))
        self.runner = paged_runner(model)
        self.runner.allocate(
            num_pages=256,
            page_size=PAGE_SIZE,
            num_slots=len(prompts),
            max_seq_len=MAX_SEQ_LEN,
            num_branch_slots=NUM_BRANCHES * len(prompts),
            max_branch_tokens=NUM_DRAFT_TOKENS + 1,
        )
        self.draft = DraftWorker(
            self.runner,
            FixedLength(NUM_DRAFT_TOKENS),
            settings=GREEDY,
            vocab_size=VOCAB_SIZE,
            stop_token_ids=[],
            num_slots=len(prompts),
            max_seq_len=MAX_SEQ_LEN,
            ahead=RoundShape(num_ahead=NUM_DRAFT_TOKENS + 1, num_branches=NUM_BRANCHES),
        )
        for slot, prompt in enumerate(prompts):
            self.pages.open(slot, prompt)
            self.pages.extend(slot, MAX_SEQ_LEN)
        lengths = np.array([len(prompt) for prompt in prompts])
        self._exchange(
            slots_R=NOTHING,
            num_accepted_R=NOTHING,
            next_token_ids_R=NOTHING,
            opened=OpenedSequences(
                slots=self.slots,
                stream_keys=self.slots,
                num_misses=np.zeros_like(lengths),
                context_lengths=lengths,
                max_lengths=np.full_like(lengths, MAX_SEQ_LEN),
            ),
            context=FlatBatch(
                np.concatenate(prompts),
                np.repeat(self.slots, lengths),
                np.concatenate([np.arange(length) for length in lengths]),
            ),
        )

    def round(self, num_accepted: list[int], next_distributions: list[int]) -> ProposalReply:
        return self._exchange(
            slots_R=self.slots,
            num_accepted_R=np.array(num_accepted),
            next_token_ids_R=np.array(next_distributions),
            opened=no_rows(),
            context=FlatBatch(NOTHING, NOTHING, NOTHING),
        )

    def _exchange(self, **fields: object) -> ProposalReply:
        request = ProposalRequest(
            suspended_slots=NOTHING,
            page_updates=self.pages.drain_updates(),
            draft_now_R=np.full_like(fields["num_accepted_R"], NUM_DRAFT_TOKENS),
            num_redraft_R=np.zeros_like(fields["num_accepted_R"]),
            next_distributions_W=None,
            **fields,
        )
        reply = self.draft.respond(request)
        self.draft.prefill_and_draft_ahead(request)
        return reply


def no_rows() -> OpenedSequences:
    return OpenedSequences(
        slots=NOTHING, stream_keys=NOTHING, num_misses=NOTHING, context_lengths=NOTHING, max_lengths=NOTHING
    )


def ranked_continuation(model: PreTrainedModel, token_ids: list[int]) -> list[int]:
    """Every token, likeliest first."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, -1].argsort(descending=True).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neo"])
def test_candidates_always_continue_the_committed_tokens(family: str) -> None:
    """Whatever is accepted and comes next, anywhere in a page: a stale cache would draft something else."""
    model = tiny_model(family, seed=5)
    generator = np.random.default_rng(1)
    lone = LoneDraft(model, prompts_of_lengths(5, 11, 16))
    candidates: list[list[int]] = [[], [], []]
    num_caught = num_missed = 0
    while max(map(len, lone.rows)) < MAX_SEQ_LEN - 3 * NUM_DRAFT_TOKENS:
        num_accepted, next_distributions, is_miss = [], [], []
        for row, chain in zip(lone.rows, candidates, strict=True):
            count = int(generator.integers(len(chain) + 1))
            row += chain[:count]
            ranked = ranked_continuation(model, row)
            rank = int(generator.choice([0, 1, 2, 17], p=[0.3, 0.4, 0.2, 0.1]))
            # After a rejection the next token is never the rejected one.
            if count < len(chain) and rank == 0:
                rank = 1
            num_accepted.append(count)
            next_distributions.append(ranked[rank])
            is_miss.append(rank > 0)
            row.append(ranked[rank])
        reply = lone.round(num_accepted, next_distributions)
        assert reply.next_token_ids_R.tolist() == next_distributions
        assert reply.ahead.is_hit_R.tolist() == [not missed for missed in is_miss]
        bounds = np.cumsum(reply.num_drafted_R)[:-1]
        candidates = [part.tolist() for part in np.split(reply.candidate_ids_C, bounds)]
        for row, chain in zip(lone.rows, candidates, strict=True):
            for depth, token in enumerate(chain):
                assert token == ranked_continuation(model, row + chain[:depth])[0]
        num_missed += sum(is_miss)
        num_caught += int(reply.ahead.is_caught_R.sum())
        assert all(len(chain) == NUM_DRAFT_TOKENS for chain, rank in
                   zip(candidates, reply.ahead.is_caught_R.tolist(), strict=True) if rank)  # fmt: skip
    assert 0 < num_caught < num_missed


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
    found = table.find(np.array([1, 3]), np.array([20, 11]), np.array([8, 5]))
    assert found.index_B.tolist() == [1] and found.draft_slots_B.tolist() == [chosen.draft_slots_B[1]]
    assert found.lengths_B.tolist() == [3]
    num_open, num_tokens = table.sizes(np.array([3, 1, 0]))
    assert num_tokens.tolist() == [7, 2, 0] and num_open.tolist() == [2, 1, 0]
    table.drop(np.array([3]))
    assert not len(table.find(np.array([3]), np.array([11]), np.array([5])).draft_slots_B)


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
