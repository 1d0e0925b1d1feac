"""The draft's side of a round: settle the last one, draft the next candidates, and draft ahead of them.

Behind a row's committed tokens stands its *chain*: the candidates that the target is verifying, and behind
them the tokens drafted ahead while it does. The target's distribution at the decision position (the one
behind the accepted candidates) settles the chain here, by the standard rule:

- The chain has no token there: the bonus token is drawn from it.
- It has one that the target has rejected: the recovered token is drawn from the residual.
- All candidates were accepted and ``a_1`` stands there, drafted ahead: it is judged like any candidate. If it
  is accepted it is the decision, and the rest of the chain are the next candidates, already drafted.

Whatever is not accepted takes the rest of its chain with it.

R rows that decode, A of them that are still drafting, W whose decision is drawn here, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from specdist.engine.chains import DraftedLaws
from specdist.engine.proposals import DRAW, ProposalReply, ProposalRequest, RoleTimes
from specdist.models.flat import FlatBatch, arange_segments
from specdist.models.memory import peak_memory_bytes
from specdist.models.runner import ModelRunner
from specdist.policies import LengthPolicy
from specdist.sampling.acceptance import accepted_flags
from specdist.sampling.coupling import next_token_laws
from specdist.sampling.distributions import Dense, SamplingSettings
from specdist.sampling.random import Purpose, uniforms


class DraftModel:
    """State per slot; every method works on all rows at once."""

    def __init__(
        self,
        runner: ModelRunner,
        policy: LengthPolicy,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        stop_token_ids: Collection[int],
        num_slots: int,
        max_seq_len: int,
        num_ahead_tokens: int = 0,
    ) -> None:
        self._runner = runner
        self.device = runner.device
        self._policy = policy
        self._settings = settings
        self._vocab_size = vocab_size
        self._is_stop_V = np.zeros(vocab_size, bool)
        self._is_stop_V[[token_id for token_id in stop_token_ids if token_id < vocab_size]] = True
        self._num_ahead_tokens = num_ahead_tokens
        # By position: tokens of the context that was run, of what was committed, and of the chain; and the
        # probability with which each token of the chain was drawn.
        width = max_seq_len + policy.max_draft_tokens + num_ahead_tokens + 1
        self._token_ids = np.zeros((num_slots, width), np.int64)
        self._probabilities = np.zeros((num_slots, width))
        self._num_committed = np.zeros(num_slots, np.int64)
        self._num_candidates = np.zeros(num_slots, np.int64)
        self._num_ahead = np.zeros(num_slots, np.int64)
        self._num_computed = np.zeros(num_slots, np.int64)
        # Chains dropped so far. A position is drafted again only after one was, so this keys its random
        # numbers: a chain drafted ahead and the same chain drafted later, after a preemption, are the same.
        self._num_misses = np.zeros(num_slots, np.int64)
        self._stream_keys = np.zeros(num_slots, np.int64)
        self._max_lengths = np.zeros(num_slots, np.int64)
        self._context_lengths = np.zeros(num_slots, np.int64)
        self._laws = DraftedLaws()
        self._times = RoleTimes()
        self._num_passes = 0

    def respond(self, request: ProposalRequest) -> ProposalReply:
        """Settle the last round; the next candidates are those drafted ahead, and those asked for now."""
        begin = time.perf_counter_ns()
        self._runner.update_pages(request.page_updates)
        slots_R = request.slots_R
        num_ahead_R = self._num_ahead[slots_R]
        is_hit_R = self._settle(request)
        self._num_candidates[slots_R] += self._extend(slots_R, request.draft_now_R)
        num_candidates_R = self._num_candidates[slots_R]
        first_R = self._num_committed[slots_R]
        slots_C = np.repeat(slots_R, num_candidates_R)
        positions_C = np.repeat(first_R, num_candidates_R) + arange_segments(num_candidates_R)
        times = self._spent(draft=time.perf_counter_ns() - begin)
        reply = ProposalReply(
            decision_ids_R=self._token_ids[slots_R, first_R - 1],
            num_drafted_R=num_candidates_R,
            candidate_ids_C=self._token_ids[slots_C, positions_C],
            draft_probabilities_C=self._probabilities[slots_C, positions_C],
            num_ahead_R=num_ahead_R,
            is_hit_R=is_hit_R,
            num_draft_passes=self._num_passes,
            times=dataclasses.replace(times, peak_memory_bytes=peak_memory_bytes(self.device)),
        )
        self._times, self._num_passes = RoleTimes(), 0
        return reply

    def follow(self, request: ProposalRequest) -> None:
        """While the target runs its pass: run the contexts that it runs, then draft ahead of every row.

        A row whose context ends here is drafted ahead of at once: its first token is a decision like any
        other. A resumed one is not: its decision was drawn before it was preempted.
        """
        begin = time.perf_counter_ns()
        self._follow_contexts(request)
        prefilled = time.perf_counter_ns()
        self._times = self._spent(prefill=prefilled - begin)
        if self._num_ahead_tokens:
            contexts = np.unique(request.context.slots_T)
            ended = contexts[self._num_committed[contexts] == self._context_lengths[contexts]]
            slots = np.r_[request.slots_R, ended].astype(np.int64)
            tails = self._num_committed[slots] + self._num_candidates[slots]
            room = self._max_lengths[slots] - tails - 1
            # The first of them will be a decision, not a candidate, and no policy's business.
            self._num_ahead[slots] = self._extend(
                slots, np.minimum(self._num_ahead_tokens, room), num_uncounted=1
            )
            self._times = self._spent(draft=time.perf_counter_ns() - prefilled)

    def _spent(self, *, prefill: int = 0, draft: int = 0) -> RoleTimes:
        return dataclasses.replace(
            self._times, prefill=self._times.prefill + prefill, draft=self._times.draft + draft
        )

    def _follow_contexts(self, request: ProposalRequest) -> None:
        opened, context = request.opened, request.context
        self._stream_keys[opened.slots] = opened.stream_keys
        self._num_misses[opened.slots] = opened.num_misses
        self._max_lengths[opened.slots] = opened.max_lengths
        self._context_lengths[opened.slots] = opened.context_lengths
        self._num_candidates[opened.slots] = 0
        self._num_ahead[opened.slots] = 0
        if not len(context):
            return
        self._token_ids[context.slots_T, context.positions_T] = context.token_ids_T
        self._runner.forward(context, [])
        # Positions ascend within a slot, so the last write is the largest.
        self._num_computed[context.slots_T] = context.positions_T + 1
        self._num_committed[context.slots_T] = context.positions_T + 1

    def _settle(self, request: ProposalRequest) -> np.ndarray:
        """Commit the accepted candidates and the decision behind them. True for rows whose ``a_1`` was it."""
        slots_R, num_accepted_R = request.slots_R, request.num_accepted_R
        positions_R = self._num_committed[slots_R] + num_accepted_R
        is_full_R = num_accepted_R == self._num_candidates[slots_R]
        is_judged_R = is_full_R & (self._num_ahead[slots_R] > 0)
        is_rejected_R = ~is_full_R
        decision_ids_R = request.decision_ids_R.copy()
        is_known_R = decision_ids_R != DRAW
        drafted_R = self._token_ids[slots_R, positions_R]
        is_hit_R = is_judged_R & is_known_R & (decision_ids_R == drafted_R)
        drawn = np.flatnonzero(~is_known_R)
        if len(drawn):
            target_W = request.decisions_W
            assert isinstance(target_W, Dense)
            slots_W, positions_W = slots_R[drawn], positions_R[drawn]
            uniforms_W = self._uniforms(slots_W, positions_W, Purpose.ACCEPT)
            drafted_W = torch.from_numpy(drafted_R[drawn])
            target_probabilities_W = target_W.probabilities_of(drafted_W.to(self.device)).cpu()
            draft_probabilities_W = torch.from_numpy(self._probabilities[slots_W, positions_W])
            flags_W = accepted_flags(target_probabilities_W, draft_probabilities_W, uniforms_W)
            is_hit_R[drawn] = is_judged_R[drawn] & flags_W.numpy()
            is_rejected_W = (is_rejected_R | is_judged_R)[drawn] & ~is_hit_R[drawn]
            # Where nothing was rejected the residual of the target's law and zeros is that law: the bonus.
            draft_W = self._laws.at(slots_W, np.where(is_rejected_W, positions_W, -1), like=target_W)
            decided_W = target_W.residual(draft_W).draw(
                self._uniforms(slots_W, positions_W, Purpose.DECIDE).to(self.device)
            )
            decision_ids_R[drawn] = np.where(is_hit_R[drawn], drafted_R[drawn], decided_W.cpu().numpy())
        self._token_ids[slots_R, positions_R] = decision_ids_R
        self._num_committed[slots_R] = positions_R + 1
        self._num_candidates[slots_R] = np.where(is_hit_R, self._num_ahead[slots_R] - 1, 0)
        self._num_ahead[slots_R] = 0
        self._num_misses[slots_R] += (is_rejected_R | is_judged_R) & ~is_hit_R
        kept_R = np.where(is_hit_R, self._num_computed[slots_R], positions_R)
        self._num_computed[slots_R] = np.minimum(self._num_computed[slots_R], kept_R)
        self._laws.age()
        return is_hit_R

    def _extend(self, slots_R: np.ndarray, num_wanted_R: np.ndarray, num_uncounted: int = 0) -> np.ndarray:
        """Draft behind each row's chain, until it has what is wanted, a stop token, or its policy's end.

        Returns the number of tokens drafted per row.
        """
        tails_R = self._num_committed[slots_R] + self._num_candidates[slots_R] + self._num_ahead[slots_R]
        num_drafted_R = np.zeros(len(slots_R), np.int64)
        active_A = np.arange(len(slots_R))
        depth = 0
        while True:
            slots_A, positions_A = slots_R[active_A], tails_R[active_A] + depth
            is_stopped_A = self._is_stop_V[self._token_ids[slots_A, positions_A - 1]]
            wanted_A = self._policy.wants_more(slots_A, max(0, depth - num_uncounted))
            wanted_A &= depth < num_wanted_R[active_A]
            active_A = active_A[wanted_A & ~is_stopped_A]
            if not len(active_A):
                return num_drafted_R
            self._step(slots_R[active_A], tails_R[active_A] + depth)
            depth += 1
            num_drafted_R[active_A] = depth

    def _step(self, slots_A: np.ndarray, positions_A: np.ndarray) -> None:
        """Draw one token at each row's position, after running what the cache lacks before it."""
        # Behind a context that was run without logits its last token is run once more.
        begins_A = np.minimum(self._num_computed[slots_A], positions_A - 1)
        lengths_A = positions_A - begins_A
        slots_T = np.repeat(slots_A, lengths_A)
        positions_T = np.repeat(begins_A, lengths_A) + arange_segments(lengths_A)
        batch = FlatBatch(self._token_ids[slots_T, positions_T], slots_T, positions_T)
        logits_AV = self._runner.forward(batch, np.cumsum(lengths_A) - 1)
        self._num_computed[slots_A] = positions_A
        self._num_passes += 1
        laws_A = next_token_laws(
            logits_AV[:, : self._vocab_size],
            self._settings,
            torch.from_numpy(self._stream_keys[slots_A]),
            torch.from_numpy(positions_A),
        )
        uniforms_A = None
        if self._settings.is_random:
            uniforms_A = self._uniforms(slots_A, positions_A, Purpose.DRAFT).to(self.device)
        drawn_A = laws_A.draw(uniforms_A)
        self._probabilities[slots_A, positions_A] = laws_A.probabilities_of(drawn_A).cpu().numpy()
        self._token_ids[slots_A, positions_A] = drawn_A.cpu().numpy()
        if isinstance(laws_A, Dense):
            self._laws.append(slots_A, positions_A, laws_A)

    def _uniforms(self, slots: np.ndarray, positions: np.ndarray, purpose: Purpose) -> Tensor:
        return uniforms(
            torch.from_numpy(self._stream_keys[slots]),
            torch.from_numpy(positions),
            torch.from_numpy(self._num_misses[slots]),
            purpose,
        )
