"""Drafting by n-gram lookup: candidates that a sequence's earlier tokens suggest, without a draft model.

Such a candidate was not drawn: its distribution Q has all mass on it. So the rejection rule accepts it with
the target's probability P(y), and after a rejection the next token is drawn from P without it. How many there
are may depend on anything that is known before the target's pass. A preempted sequence is verified again by
the same random numbers, for which other candidates were not fair; its block is the same when it goes on,
since its candidates depend on its tokens alone and their number is part of the request.

Where a constraint says which tokens may come next, a candidate that is not allowed would be rejected for
certain, so the block ends before it. Where a single token is allowed it is the next one for certain, whatever
the n-grams say: the block goes on with it, also where they have nothing to propose.

R sequences that decode, K candidates of each at most, C candidates of all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from specdist.engine.draft.client import NONE_REJECTED, sample_alone
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.engine.times.reports import AheadReport, RoleTimes
from specdist.engine.times.timeline import Timeline
from specdist.policies.costs import CostModel
from specdist.policies.ngrams import LEAST_CHANCE, NgramLengths, PromptLookup
from specdist.sampling.constraints.matcher import WORD_BITS, only_tokens
from specdist.sampling.distributions import NOT_FINITE, SamplingSettings
from specdist.sampling.processing.processors import TokenMasker
from specdist.utils.ranges import places_from

# Features of a distribution on one token: no entropy, and probability 1.
CERTAIN_31 = np.array([[0.0], [1.0], [1.0]])


class NgramDraft:
    """The proposer in the process of the target, or of its rank 0; other ranks have no part in it."""

    def __init__(
        self,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        num_slots: int,
        max_draft_tokens: int,
        max_seq_len: int,
        costs: CostModel | None = None,
        stop_token_ids: Collection[int] = (),
        is_traced: bool = False,
        masker: TokenMasker | None = None,
    ) -> None:
        """
        Args:
            costs: times of passes, which decide how many candidates are verified; None verifies all.
            masker: of tokens that may not be proposed, or must be.
        """
        self._lookup = PromptLookup(num_slots, max_seq_len + 1)
        self._lengths = None if costs is None else NgramLengths(costs)
        self._pipeline: LogitsPipeline | None = None
        if masker is not None:
            self._pipeline = LogitsPipeline(
                settings, self._lookup.token_ids,
                num_slots=num_slots, vocab_size=vocab_size, device=torch.device("cpu"), masker=masker,
            )  # fmt: skip
        self._has_masks = self._pipeline is not None and self._pipeline.has_masks
        self._stop_token_ids = np.array(sorted(stop_token_ids), np.int64)
        self._is_traced = is_traced
        # What was found for every slot in the last round: candidates, their matches, how many, and how many
        # of them are verified.
        self._candidate_ids, self._matches = np.zeros((2, num_slots, max_draft_tokens), np.int64)
        self._num_found, self._num_verified = np.zeros((2, num_slots), np.int64)
        self._clock = Timeline("idle")

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock  # the target is idle all the while
        next_token_ids_R = sample_alone(request, self._rejected_ids(request))
        with self._clock.phase("draft"):
            self._remember(request, next_token_ids_R)
            num_drafted_R = self._find(request, next_token_ids_R)
        self._open(request)
        slots_R, num_candidates = request.slots_R, int(num_drafted_R.sum())
        return ProposalReply(
            next_token_ids_R=next_token_ids_R,
            num_drafted_R=num_drafted_R,
            candidate_ids_C=self._candidate_ids[places_from(slots_R, 0 * slots_R, num_drafted_R)],
            draft_probabilities_C=np.ones(num_candidates),
            ahead=AheadReport.nothing(len(slots_R)),
            draft_pass_sizes_P=np.zeros(0, np.int64),
            times=RoleTimes(**self._clock.take()),
            features_3C=CERTAIN_31.repeat(num_candidates, axis=1) if self._is_traced else None,
        )

    def close(self) -> None:
        """Nothing to do: no other rank waits."""

    def _open(self, request: ProposalRequest) -> None:
        """Forget the last sequences of these slots."""
        slots = request.opened.slots
        self._lookup.num_tokens[slots] = self._num_found[slots] = self._num_verified[slots] = 0
        if self._pipeline is not None:
            self._pipeline.open(request.opened)

    def _rejected_ids(self, request: ProposalRequest) -> np.ndarray:
        """[R]: the candidate that was rejected in the next token's place, if one was."""
        slots_R, num_accepted_R = request.slots_R, request.num_accepted_R
        is_rejected_R = num_accepted_R < self._num_verified[slots_R]
        places_R = np.where(is_rejected_R, num_accepted_R, 0)
        return np.where(is_rejected_R, self._candidate_ids[slots_R, places_R], NONE_REJECTED)

    def _remember(self, request: ProposalRequest, next_token_ids_R: np.ndarray) -> None:
        """Take in what was committed since the last request, and the next tokens."""
        slots_R, num_accepted_R = request.slots_R, request.num_accepted_R
        if self._lengths is not None:
            num_R = np.minimum(num_accepted_R + 1, self._num_found[slots_R])
            places_C = places_from(slots_R, 0 * slots_R, num_R)
            is_accepted_C = places_C[1] < num_accepted_R.repeat(num_R)
            is_next_C = self._candidate_ids[places_C] == next_token_ids_R.repeat(num_R)
            self._lengths.observe(self._matches[places_C], is_accepted_C | is_next_C)
        known = self._lookup.num_tokens[slots_R].tolist()
        for slot, sequence, num_known, next_id in zip(
            slots_R.tolist(), request.sequences, known, next_token_ids_R.tolist(), strict=True
        ):
            next_ids = [] if next_id == NOT_FINITE else [next_id]
            self._lookup.append(slot, sequence.token_ids[num_known:] + next_ids)

    def _find(self, request: ProposalRequest, next_token_ids_R: np.ndarray) -> np.ndarray:
        """[R]: how many candidates of each sequence are to be verified; they are kept."""
        slots_R, is_resumed_R = request.slots_R, request.num_redraft_R > 0
        is_end_R = self._is_stop(next_token_ids_R) | (next_token_ids_R == NOT_FINITE)
        limits_R = np.where(is_end_R, 0, request.draft_now_R)
        limits_R = np.where(is_resumed_R, np.minimum(request.num_redraft_R, limits_R), limits_R)
        width = int(limits_R.max(initial=0))
        found_RK, matches_RK = self._lookup.find(slots_R, width)
        is_found_RK = matches_RK > 0
        if self._lengths is not None:
            is_found_RK &= (self._lengths.chances(matches_RK) >= LEAST_CHANCE) | is_resumed_R[:, None]
        # Nothing after a stop token.
        is_found_RK[:, 1:] &= ~np.logical_or.accumulate(self._is_stop(found_RK), axis=1)[:, :-1]
        num_R = np.minimum(is_found_RK.sum(axis=1), limits_R)
        if self._has_masks:
            num_R = self._allowed(slots_R, (found_RK, matches_RK), num_R, limits_R)
        self._candidate_ids[slots_R, :width], self._matches[slots_R, :width] = found_RK, matches_RK
        self._num_found[slots_R] = num_R
        if self._lengths is not None and len(slots_R):
            num_context = float(self._lookup.num_tokens[slots_R].mean())
            paying_R = self._lengths.lengths(matches_RK, num_R, request.num_prefill_tokens, num_context)
            num_R = np.where(is_resumed_R, num_R, paying_R)
        self._num_verified[slots_R] = num_R
        return num_R

    def _is_stop(self, token_ids: np.ndarray) -> np.ndarray:
        return np.isin(token_ids, self._stop_token_ids)

    def _allowed(
        self, slots_R: np.ndarray, found: tuple[np.ndarray, ...], num_R: np.ndarray, limits_R: np.ndarray
    ) -> np.ndarray:
        """[R]: how many of the ``num_R`` candidates are allowed, with those that are the only ones: these are
        put among ``found``, each as a certain one."""
        assert self._pipeline is not None
        (found_RK, matches_RK), num_allowed_R = found, np.zeros_like(num_R)
        positions_R, rows = self._lookup.num_tokens[slots_R], np.flatnonzero(limits_R)
        for depth in range(found_RK.shape[1]):
            places = slots_R[rows], positions_R[rows] + depth
            masks_NW = self._pipeline.masks_of_lines(*places) if len(rows) else None
            if masks_NW is None:
                break
            only_N, tokens_N = only_tokens(masks_NW), found_RK[rows, depth]
            words_N = masks_NW[np.arange(len(rows)), tokens_N // WORD_BITS]
            is_allowed_N = (depth < num_R[rows]) & ((words_N >> (tokens_N % WORD_BITS)) & 1 == 1)
            is_forced_N = only_N >= 0
            # After a token that is another one the rest of what was found is of no use.
            num_R[rows[is_forced_N & ~is_allowed_N]] = 0
            matches_RK[rows[is_forced_N], depth] = 0
            found_RK[rows, depth] = self._pipeline.token_ids[places] = np.where(is_forced_N, only_N, tokens_N)
            goes_on_N = is_forced_N | is_allowed_N
            num_allowed_R[rows[goes_on_N]] = depth + 1
            rows = rows[goes_on_N & ~self._is_stop(found_RK[rows, depth]) & (depth + 1 < limits_R[rows])]
        return num_allowed_R
