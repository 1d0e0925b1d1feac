"""The draft's cache holds what its bookkeeping says: no rejected tokens, and all of the branches.

A draft with a stale cache draws worse tokens and reports their true probabilities: the output stays exact,
and no test of the output detects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.policies import DraftSequences, FixedLength, LengthPolicy
from specdist.policies.payoff import SYNCHRONOUS, RoundShape
from specdist.sampling.distributions import SamplingSettings
from tests.engine.checked import CheckedReplica
from tests.engine.harness import requests_for
from tests.engine.sampled import FILTERED, PLAIN, PROMPTS, markov_replica

GREEDY = SamplingSettings(temperature=0.0)
AHEAD: list[dict[str, int]] = [{}, {"num_ahead_tokens": 5}, {"num_ahead_tokens": 5, "num_branches": 3}]


@dataclass
class Pausing(LengthPolicy):
    """Drafts nothing every third time: the cache of a row then lacks several tokens, with rejected ones in
    their positions."""

    max_draft_tokens: int = 3
    _num_bursts: int = 0

    def wants(self, rows: DraftSequences) -> np.ndarray:
        self._num_bursts += 1
        return np.full(len(rows.slots_R), self.max_draft_tokens if self._num_bursts % 3 else 0)


class Cached(CheckedReplica):
    """The tokens of every sequence are those in the cache, from its context on."""

    def __init__(self, *models: Any, **options: Any) -> None:
        super().__init__(*models, **options)
        self._begins: dict[int, int] = {}

    def check(self, state: DraftState, request: ProposalRequest, reply: ProposalReply) -> None:
        for slot in request.slots_R.tolist():
            begin, end = self._begins[slot], int(state.num_computed[slot])
            assert self.draft_runner.is_cached(slot, begin, state.token_ids[slot, begin:end])
            self.num_checked += end - begin
        # The tokens before a context are in pages that another row has written.
        for slot in request.opened.slots.tolist():
            self._begins[slot] = int(request.context.positions_T[request.context.slots_T == slot].min())


@pytest.mark.parametrize(
    ("ahead", "settings", "num_pages", "pauses"),
    [
        (AHEAD[0], GREEDY, 1000, True),
        (AHEAD[0], FILTERED, 24, False),
        (AHEAD[1], PLAIN, 24, True),
        (AHEAD[2], FILTERED, 1000, False),
        (AHEAD[2], GREEDY, 24, True),
    ],
    ids=["roomy, pausing", "tight", "asynchronous, tight, pausing", "branches", "branches, tight, pausing"],
)
def test_the_cache_of_every_row_is_what_the_draft_assumes(
    ahead: dict[str, Any], settings: SamplingSettings, num_pages: int, pauses: bool
) -> None:
    policy = Pausing() if pauses else FixedLength(3)
    replica = markov_replica(
        settings,
        kind=Cached,
        policy=policy,
        max_num_seqs=20,
        num_pages=num_pages,
        max_new_tokens=50,
        max_seq_len=64,
        **ahead,
    )
    replica.generate(requests_for(PROMPTS, 5))
    stats = replica.stats_recorder.close_shard(0)
    assert replica.num_checked > 1000 and stats.num_misses > 50
    assert (stats.num_preemptions > 5) == (num_pages == 24)
    assert stats.num_branch_hits > 10 or not replica.ahead.num_branches


class Redrawn(CheckedReplica):
    """Every candidate is what the draft draws greedily after all tokens before it."""

    def check(self, state: DraftState, request: ProposalRequest, reply: ProposalReply) -> None:
        for slot, number in zip(request.slots_R.tolist(), reply.num_drafted_R.tolist(), strict=True):
            begin = int(state.num_committed[slot])
            token_ids = torch.from_numpy(state.token_ids[slot, : begin + number])
            for end in range(begin, begin + number):
                logits_V = self.draft_runner.model.logits_after(token_ids[None, :end])
                assert logits_V.argmax() == token_ids[end]
            self.num_checked += number


@pytest.mark.parametrize(
    "shapes",
    [(), [RoundShape(num_ahead=3, num_branches=3), SYNCHRONOUS]],
    ids=["ahead", "ahead, then in turns"],
)
def test_what_is_drafted_continues_the_committed_tokens(shapes: Sequence[RoundShape]) -> None:
    """Whatever is accepted and comes next, anywhere in a page. In every second round in turns the draft goes
    on after what the round before has drafted ahead, before its reply."""
    replica = markov_replica(
        GREEDY,
        kind=Redrawn,
        policy=FixedLength(6),
        num_ahead_tokens=4,
        num_branches=3,
        shapes=shapes,
        max_num_seqs=20,
        max_new_tokens=50,
        max_seq_len=64,
    )
    # No two share a prefix, which the draft would find in pages alone.
    replica.generate(requests_for([[first, *prompt] for first in range(7) for prompt in PROMPTS[:2]]))
    stats = replica.stats_recorder.close_shard(0)
    assert replica.num_checked > 200
    assert stats.num_branch_hits > 10
