"""Drafting from memory: candidates that a sequence's own earlier tokens suggest, without a draft model.

A candidate from memory was not drawn: its distribution Q has all mass on it. So the rejection rule accepts it
with the target's probability P(y), and after a rejection the next token is drawn from P without it. How many
there are may depend on the tokens before them alone, and does: the block of a preempted sequence is the same
when it goes on.

R sequences that decode, C candidates of all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from specdist.drafters.ngram_index import NgramIndex
from specdist.drafters.text_store import NO_TEXTS, TextSettings
from specdist.engine.no_draft import sample_alone
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.reports import AheadReport, RoleTimes, TracedDrafts
from specdist.engine.timeline import Timeline
from specdist.policies import NUM_FEATURES
from specdist.sampling.distributions import NOT_FINITE
from specdist.sampling.one_hot_drafts import NONE_REJECTED
from specdist.utils.ranges import arange_segments


class MemoryDraft:
    """The proposer in the process of the target, or of its rank 0; other ranks have no part in it."""

    def __init__(
        self,
        *,
        least_chance: float,
        max_draft_tokens: int,
        num_slots: int,
        max_seq_len: int,
        stop_token_ids: Collection[int] = (),
        is_traced: bool = False,
        texts: TextSettings = NO_TEXTS,
        learns_together: bool = False,
        is_compiled: bool | None = None,
    ) -> None:
        """
        Args:
            least_chance: for a token to be proposed, that it and all before it in the block are right.
            texts, learns_together, is_compiled: see :class:`NgramIndex`.
        """
        self._least_chance = least_chance
        self._index = NgramIndex(
            num_slots=num_slots, max_length=max_seq_len + 1, learns_together=learns_together, texts=texts,
            is_compiled=is_compiled,
        )  # fmt: skip
        self._stop_token_ids = np.array(sorted(stop_token_ids), np.int64)
        self._is_traced = is_traced
        self._is_new, self._is_resumed = np.ones(num_slots, bool), np.zeros(num_slots, bool)
        # Of the last block of every slot.
        self._candidate_ids = np.zeros((num_slots, max_draft_tokens), np.int64)
        self._num_candidates = np.zeros(num_slots, np.int64)
        self._clock = Timeline("idle")

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock  # the target is idle all the while
        next_token_ids_R = sample_alone(request, self._rejected_ids(request))
        with self._clock.phase("draft"):
            candidate_ids_C, num_drafted_R = self._candidates(request, next_token_ids_R)
        self._is_new[request.opened.slots] = True
        self._is_resumed[request.opened.slots] = request.opened.are_resumed
        times = RoleTimes(**self._clock.take())
        return ProposalReply(
            next_token_ids_R=next_token_ids_R,
            num_drafted_R=num_drafted_R,
            candidate_ids_C=candidate_ids_C,
            draft_probabilities_C=np.ones(len(candidate_ids_C)),
            ahead=AheadReport.nothing(len(num_drafted_R)),
            draft_pass_sizes_P=np.zeros(0, np.int64),
            num_from_memory_R=num_drafted_R,
            times=times,
            traced=_traced(len(candidate_ids_C), len(num_drafted_R)) if self._is_traced else None,
        )

    def close(self) -> None:
        """Nothing to do: no other rank waits."""

    def _rejected_ids(self, request: ProposalRequest) -> np.ndarray:
        """[R]: the candidate that was rejected in the next token's place, if one was."""
        slots_R, num_accepted_R = request.slots_R, request.num_accepted_R
        is_rejected_R = (num_accepted_R < self._num_candidates[slots_R]) & ~self._is_new[slots_R]
        places_R = np.where(is_rejected_R, num_accepted_R, 0)
        return np.where(is_rejected_R, self._candidate_ids[slots_R, places_R], NONE_REJECTED)

    def _candidates(
        self, request: ProposalRequest, next_token_ids_R: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Candidates [C], and how many of each sequence [R]."""
        slots_R = request.slots_R
        self._remember(request, next_token_ids_R)
        is_end_R = np.isin(next_token_ids_R, self._stop_token_ids) | (next_token_ids_R == NOT_FINITE)
        limits_R = np.where(is_end_R, 0, request.draft_now_R)
        found = self._index.propose(slots_R, limits_R, least_chance=self._least_chance)
        found = found.until(self._stop_token_ids)
        token_ids_C, lengths_R = found.token_ids_C, found.lengths_R
        self._candidate_ids[np.repeat(slots_R, lengths_R), arange_segments(lengths_R)] = token_ids_C
        self._num_candidates[slots_R] = lengths_R
        return token_ids_C, lengths_R

    def _remember(self, request: ProposalRequest, next_token_ids_R: np.ndarray) -> None:
        """All tokens that were committed since the last request, and the next ones."""
        slots_R, sequences = request.slots_R, request.sequences
        new = np.flatnonzero(self._is_new[slots_R])
        if len(new):
            num_prompt_tokens = [sequences[index].num_prompt_tokens for index in new.tolist()]
            self._index.begin(
                slots_R[new], np.array(num_prompt_tokens, np.int64), self._is_resumed[slots_R[new]]
            )
            self._is_new[slots_R[new]] = False
        token_ids: list[int] = []
        counts = []
        known = self._index.num_tokens(slots_R).tolist()
        for sequence, num_known, next_id in zip(sequences, known, next_token_ids_R.tolist(), strict=True):
            added = [*sequence.token_ids[num_known:], *[next_id] * (next_id != NOT_FINITE)]
            token_ids += added
            counts.append(len(added))
        self._index.append(slots_R, np.array(counts, np.int64), np.array(token_ids, np.int64))


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
