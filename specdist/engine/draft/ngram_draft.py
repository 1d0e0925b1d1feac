"""Drafting by n-gram lookup: candidates that earlier tokens suggest, without a draft model.

Such a candidate was not drawn: its distribution Q has all mass on it. So the rejection rule accepts it with
the target's probability P(y), and after a rejection the next token is drawn from P without it. How many there
are may depend on anything that is known before the target's pass; where a seed is to fix the tokens under
rejection, on the tokens before them alone. A preempted sequence's block is the same when it goes on.

Where a constraint says which tokens may come next, a candidate that is not allowed would be rejected for
certain, so the block ends before it. Where a single token is allowed it is the next one for certain, whatever
the n-grams say: the block goes on with it, also where they have nothing to propose.

R sequences that decode, C candidates of all of them, one after the other, N positions, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from specdist.engine.draft.client import sample_alone
from specdist.engine.messages.opened import NONE
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.engine.times.reports import AheadReport, RoleTimes, TracedDrafts
from specdist.engine.times.timeline import Timeline
from specdist.policies import NUM_FEATURES
from specdist.policies.ngrams.block_lengths import BlockLengths, NgramSettings
from specdist.policies.ngrams.ngram_index import NgramIndex, Proposals
from specdist.sampling.constraints.matcher import WORD_BITS, only_tokens
from specdist.sampling.distributions import NOT_FINITE, SamplingSettings
from specdist.sampling.one_hot_drafts import NONE_REJECTED
from specdist.sampling.processing.processors import TokenMasker
from specdist.utils.ranges import arange_segments, places_from


class NgramDraft:
    """The proposer in the process of the target, or of its rank 0; other ranks have no part in it."""

    def __init__(
        self,
        ngrams: NgramSettings,
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
        """``ngrams``: what is looked up; ``masker``: of tokens that may not be proposed, or must be."""
        self._ngrams = ngrams
        self._index = NgramIndex(
            num_slots=num_slots, max_length=max_seq_len + 1, learns_together=ngrams.learns_together,
            texts=ngrams.texts,
        )  # fmt: skip
        self._lengths = BlockLengths(ngrams.costs)
        self._pipeline: LogitsPipeline | None = None
        if masker is not None:
            self._pipeline = LogitsPipeline(
                settings, self._index.tokens,
                num_slots=num_slots, vocab_size=vocab_size, device=torch.device("cpu"), masker=masker,
            )  # fmt: skip
        self._allowed = AllowedTokens(self._pipeline, stop_token_ids)
        self._is_traced = is_traced
        self._is_new, self._is_resumed = np.ones(num_slots, bool), np.zeros(num_slots, bool)
        self._stream_keys, self._num_prompt_tokens = np.zeros((2, num_slots), np.int64)
        # The last block of every slot, and those of preempted sequences, by random stream: each is verified
        # again, by the same random numbers, and other candidates were not fair: more may be known by then.
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
        found = self._index.propose(slots_R, limits_R, least_chance=self._ngrams.least_chance)
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


class AllowedTokens:
    """Of one side. ``pipeline``: knows the rows' masks and tokens; None where all tokens are allowed."""

    def __init__(self, pipeline: LogitsPipeline | None, stop_token_ids: Collection[int]) -> None:
        self._pipeline = pipeline if pipeline is not None and pipeline.has_masks else None
        # The last entries are those of all other tokens, and of NOT_FINITE.
        self._is_stop = np.zeros(max(stop_token_ids, default=0) + 1 - NOT_FINITE, bool)
        self._is_stop[list(stop_token_ids)] = True

    def is_stop(self, token_ids: np.ndarray) -> np.ndarray:
        is_stop: np.ndarray = self._is_stop[np.minimum(token_ids, len(self._is_stop) - 1)]
        return is_stop

    def of(
        self, found: Proposals, slots_R: np.ndarray, begins_R: np.ndarray, limits_R: np.ndarray
    ) -> Proposals:
        """What of the proposals is allowed, and what is certain after it: nothing after a stop token, and at
        most ``limits_R`` of each.

        Args:
            begins_R: positions of the first proposed tokens. All tokens before them are in the pipeline's
                table, where the candidates are written, too.
        """
        found = found.until(self.is_stop(found.token_ids_C))
        if self._pipeline is None:
            return found
        table = self._pipeline.token_ids
        table[places_from(slots_R, begins_R, found.lengths_R)] = found.token_ids_C
        # After each block one position more, if there is room for a token.
        asked_R = np.minimum(found.lengths_R + 1, limits_R)
        masks_NW = self._pipeline.masks_of_lines(*places_from(slots_R, begins_R, asked_R))
        if masks_NW is None:
            return found
        starts_R, only_N = np.cumsum(asked_R) - asked_R, only_tokens(masks_NW)
        given_R, lengths_R = found.lengths_R, found.lengths_R.copy()
        lines_C, depths_C = np.repeat(np.arange(len(slots_R)), given_R), arange_segments(given_R)
        index_C, words_C = starts_R[lines_C] + depths_C, found.token_ids_C // WORD_BITS
        is_allowed_C = (masks_NW[index_C, words_C] >> (found.token_ids_C % WORD_BITS)) & 1 == 1
        np.minimum.at(lengths_R, lines_C[~is_allowed_C], depths_C[~is_allowed_C])
        # The chance of a token after those before it, which is 1 where no other is allowed.
        rates_C = found.chances_C / np.where(depths_C > 0, np.r_[1.0, found.chances_C[:-1]], 1.0)
        rates_C = np.where(only_N[index_C] == found.token_ids_C, 1.0, rates_C)
        forced_R = np.full(len(slots_R), -1)
        is_open_R = lengths_R < asked_R
        forced_R[is_open_R] = only_N[(starts_R + lengths_R)[is_open_R]]
        added = self._forced_after(forced_R, slots_R, begins_R + lengths_R, limits_R - lengths_R)
        tokens, chances = [np.zeros(0, np.int64)], [np.zeros(0)]
        begins = (np.cumsum(given_R) - given_R).tolist()
        for row, (begin, length) in enumerate(zip(begins, lengths_R.tolist(), strict=True)):
            tokens.append(np.r_[found.token_ids_C[begin : begin + length], added[row]].astype(np.int64))
            chances.append(np.r_[rates_C[begin : begin + length], np.ones(len(added[row]))].cumprod())
        return Proposals(
            np.concatenate(tokens),
            np.concatenate(chances),
            np.array([len(each) for each in tokens[1:]], np.int64),
        )

    def _forced_after(
        self, forced_R: np.ndarray, slots_R: np.ndarray, ends_R: np.ndarray, room_R: np.ndarray
    ) -> list[list[int]]:
        """The tokens from these positions on that are the only ones allowed, one after the other; the first
        of them, or -1, is known."""
        assert self._pipeline is not None
        added: list[list[int]] = [[] for _ in slots_R]
        rows = np.flatnonzero((forced_R >= 0) & (room_R > 0))
        tokens = forced_R[rows]
        while len(rows):
            self._pipeline.token_ids[slots_R[rows], ends_R[rows]] = tokens
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                added[row].append(token)
            counts = np.array([len(added[row]) for row in rows.tolist()])
            rows = rows[~self.is_stop(tokens) & (counts < room_R[rows])]
            ends_R = ends_R + 1
            masks_NW = self._pipeline.masks_of_lines(slots_R[rows], ends_R[rows]) if len(rows) else None
            tokens = np.zeros(0, np.int64) if masks_NW is None else only_tokens(masks_NW)
            rows, tokens = rows[: len(tokens)][tokens >= 0], tokens[tokens >= 0]
        return added
