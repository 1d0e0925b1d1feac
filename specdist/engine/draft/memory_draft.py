"""Drafting from memory: candidates that earlier tokens suggest, without a draft model.

A candidate from memory was not drawn: its distribution Q has all mass on it. So the rejection rule accepts it
with the target's probability P(y), and after a rejection the next token is drawn from P without it. How many
there are may depend on anything that is known before the target's pass; where a seed is to fix the tokens
under rejection, on the tokens before them alone. A preempted sequence's block is the same when it goes on.

R sequences that decode, C candidates of all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import numpy as np
import torch

from specdist.engine.draft.allowed_tokens import AllowedTokens
from specdist.engine.draft.client import sample_alone
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.target.opened import NONE
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.engine.times.reports import AheadReport, RoleTimes, TracedDrafts
from specdist.engine.times.timeline import Timeline
from specdist.policies import NUM_FEATURES
from specdist.policies.ngrams.block_lengths import BlockLengths, MemorySettings
from specdist.policies.ngrams.ngram_index import NgramIndex, Proposals
from specdist.sampling.distributions import NOT_FINITE, SamplingSettings
from specdist.sampling.one_hot_drafts import NONE_REJECTED
from specdist.sampling.processing.processors import TokenMasker
from specdist.utils.ranges import places_from

CPU = torch.device("cpu")


class MemoryDraft:
    """The proposer in the process of the target, or of its rank 0; other ranks have no part in it."""

    def __init__(
        self,
        memory: MemorySettings,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        num_slots: int,
        max_draft_tokens: int,
        max_seq_len: int,
        stop_token_ids: Collection[int] = (),
        is_traced: bool = False,
        masker: TokenMasker | None = None,
    ) -> None:
        """``masker``: of tokens that may not be proposed, or must be."""
        self._memory = memory
        self._index = NgramIndex(
            num_slots=num_slots, max_length=max_seq_len + 1, learns_together=memory.learns_together,
            texts=memory.texts,
        )  # fmt: skip
        self._lengths = BlockLengths(memory.costs)
        self._pipeline: LogitsPipeline | None = None
        if masker is not None:
            tokens, rows = self._index.tokens, partial(LogitsPipeline, num_slots=num_slots, device=CPU)
            self._pipeline = rows(settings, tokens, vocab_size=vocab_size, masker=masker)
        self._allowed = AllowedTokens(self._pipeline, stop_token_ids)
        self._is_traced = is_traced
        self._is_new, self._is_resumed = np.ones(num_slots, bool), np.zeros(num_slots, bool)
        self._stream_keys, self._num_prompt_tokens = np.zeros((2, num_slots), np.int64)
        # The last block of every slot, and those of preempted sequences, by random stream: each is verified
        # again, by the same random numbers, and other candidates, for memory may know more by then, were not
        # fair.
        self._candidate_ids = np.zeros((num_slots, max_draft_tokens), np.int64)
        self._num_candidates = np.zeros(num_slots, np.int64)
        self._suspended: dict[int, np.ndarray] = {}
        self._clock = Timeline("idle")

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock  # the target is idle all the while
        next_token_ids_R = sample_alone(request, self._rejected_ids(request))
        with self._clock.phase("draft"):
            found = self._candidates(request, next_token_ids_R)
        self._open(request)
        times = RoleTimes(**self._clock.take())
        num_candidates = len(found.token_ids_C)
        return ProposalReply(
            next_token_ids_R=next_token_ids_R,
            num_drafted_R=found.lengths_R,
            candidate_ids_C=found.token_ids_C,
            draft_probabilities_C=np.ones(num_candidates),
            ahead=AheadReport.nothing(len(found.lengths_R)),
            draft_pass_sizes_P=np.zeros(0, np.int64),
            times=times,
            traced=_traced(num_candidates, len(found.lengths_R)) if self._is_traced else None,
        )

    def close(self) -> None:
        """Nothing to do: no other rank waits."""

    def _open(self, request: ProposalRequest) -> None:
        """Put the last blocks of preempted sequences aside, and begin new ones, perhaps in their slots."""
        suspended, opened = request.suspended_slots, request.opened
        for slot, stream_key in zip(suspended.tolist(), self._stream_keys[suspended].tolist(), strict=True):
            self._suspended[stream_key] = self._candidate_ids[slot, : self._num_candidates[slot]].copy()
        for slot, stream_key in zip(opened.slots.tolist(), opened.stream_keys.tolist(), strict=True):
            block = self._suspended.pop(stream_key, NONE)
            self._candidate_ids[slot, : len(block)], self._num_candidates[slot] = block, len(block)
        self._is_new[opened.slots] = True
        self._is_resumed[opened.slots] = opened.are_resumed
        self._stream_keys[opened.slots] = opened.stream_keys
        self._num_prompt_tokens[opened.slots] = opened.num_prompt_tokens
        if self._pipeline is not None:
            self._pipeline.open(opened)

    def _rejected_ids(self, request: ProposalRequest) -> np.ndarray:
        """[R]: the candidate that was rejected in the next token's place, if one was."""
        slots_R, num_accepted_R = request.slots_R, request.num_accepted_R
        is_rejected_R = num_accepted_R < self._num_verified(slots_R)
        places_R = np.where(is_rejected_R, num_accepted_R, 0)
        return np.where(is_rejected_R, self._candidate_ids[slots_R, places_R], NONE_REJECTED)

    def _num_verified(self, slots_R: np.ndarray) -> np.ndarray:
        """[R]: candidates in the last pass."""
        return np.where(self._is_new[slots_R], 0, self._num_candidates[slots_R])

    def _last_blocks(self, slots_R: np.ndarray, are_wanted_R: np.ndarray) -> Proposals:
        """Of some of the sequences."""
        lengths_R = np.where(are_wanted_R, self._num_candidates[slots_R], 0)
        token_ids_C = self._candidate_ids[places_from(slots_R, np.zeros_like(slots_R), lengths_R)]
        return Proposals(token_ids_C, np.ones(len(token_ids_C)), lengths_R)

    def _candidates(self, request: ProposalRequest, next_token_ids_R: np.ndarray) -> Proposals:
        """The candidates, which are kept."""
        slots_R = request.slots_R
        num_pass_tokens = len(slots_R) + int(self._num_verified(slots_R).sum())
        self._remember(request, next_token_ids_R)
        positions_R = self._index.num_tokens(slots_R)
        num_context = float(positions_R.mean()) if len(slots_R) else 0.0
        self._lengths.observe_round(
            len(slots_R) + int(request.num_accepted_R.sum()),
            num_pass_tokens=num_pass_tokens,
            num_rows=len(slots_R),
            num_context=num_context,
        )
        is_end_R = self._allowed.is_stop(next_token_ids_R) | (next_token_ids_R == NOT_FINITE)
        limits_R, is_resumed_R = np.where(is_end_R, 0, request.draft_now_R), request.num_redraft_R > 0
        found = self._index.propose(slots_R, limits_R, least_chance=self._memory.least_chance)
        found = self._allowed.of(found, slots_R, positions_R, limits_R)
        kept_R = self._lengths.lengths(
            found.chances_C,
            found.lengths_R,
            num_pass_tokens=len(slots_R) + request.num_prefill_tokens,
            num_rows=len(slots_R),
            num_context=num_context,
        )
        again = self._last_blocks(slots_R, is_resumed_R).first(limits_R)
        found = found.first(kept_R).instead(is_resumed_R, again)
        places_C = places_from(slots_R, np.zeros_like(slots_R), found.lengths_R)
        self._candidate_ids[places_C] = found.token_ids_C
        self._num_candidates[slots_R] = found.lengths_R
        return found

    def _remember(self, request: ProposalRequest, next_token_ids_R: np.ndarray) -> None:
        """All tokens that were committed since the last request, and the next ones."""
        slots_R = request.slots_R
        new = slots_R[self._is_new[slots_R]]
        self._index.begin(new, self._num_prompt_tokens[new], self._is_resumed[new])
        self._is_new[new] = False
        token_ids: list[int] = []
        counts = []
        known = self._index.num_tokens(slots_R).tolist()
        for sequence, num_known, next_id in zip(
            request.sequences, known, next_token_ids_R.tolist(), strict=True
        ):
            added = [*sequence.token_ids[num_known:], *[next_id] * (next_id != NOT_FINITE)]
            token_ids += added
            counts.append(len(added))
        self._index.append(slots_R, np.array(counts, np.int64), np.array(token_ids, np.int64))
        self._index.learn(slots_R)


def _traced(num_candidates: int, num_rows: int) -> TracedDrafts:
    """A distribution on one token: no entropy, and probability 1."""
    of_one = np.array([0.0, 1.0, 1.0, np.nan])[:NUM_FEATURES, None]
    nothing_R = np.zeros(num_rows)
    return TracedDrafts(
        features_4C=np.repeat(of_one, num_candidates, axis=1),
        is_verified_R=nothing_R.astype(bool),
        is_hit_R=nothing_R.astype(bool),
        token_ids_R=nothing_R.astype(np.int64),
        features_4R=np.repeat(of_one, num_rows, axis=1),
        acceptance_R=nothing_R,
    )
