"""The draft's side of a round: settle the decisions, draft the next candidates, follow the prompts.

It holds its own distributions of the candidates it sent, so the recovered token of a rejection is drawn here,
from the one target distribution that travels per row.

R rows that decode, A of them that are still drafting, W whose decision is drawn here, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from specdist.engine.proposals import DRAW, ProposalReply, ProposalRequest, RoleTimes
from specdist.models.flat import FlatBatch, arange_segments
from specdist.models.memory import peak_memory_bytes
from specdist.models.runner import ModelRunner
from specdist.policies import LengthPolicy
from specdist.sampling.distributions import (
    Dense,
    Distributions,
    SamplingSettings,
    distributions_from_logits,
)
from specdist.sampling.random import Purpose, uniforms


class DraftSteps:
    """The distributions of one block's candidates: step i holds those of the rows with an i-th candidate."""

    def __init__(self) -> None:
        self._steps: list[tuple[np.ndarray, Distributions]] = []

    def append(self, slots_A: np.ndarray, distributions_A: Distributions) -> None:
        self._steps.append((slots_A, distributions_A))

    def at_rejections(self, slots_W: np.ndarray, depths_W: np.ndarray, like: Dense) -> Dense:
        """Per row the draft's distribution of its candidate number ``depth``; zeros if it has fewer."""
        rows_WV = torch.zeros_like(like.probabilities_NV)
        for depth, (slots_A, distributions_A) in enumerate(self._steps):
            wanted = np.flatnonzero(depths_W == depth)
            order = {slot: index for index, slot in enumerate(slots_A.tolist())}
            pairs = [(row, order[slot]) for row in wanted.tolist() if (slot := int(slots_W[row])) in order]
            if pairs:
                assert isinstance(distributions_A, Dense)
                rows, sources = torch.tensor(pairs, device=rows_WV.device).T
                rows_WV[rows] = distributions_A.probabilities_NV[sources]
        return Dense(rows_WV)


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
    ) -> None:
        self._runner = runner
        self.device = runner.device
        self._policy = policy
        self._settings = settings
        self._vocab_size = vocab_size
        self._is_stop_V = np.zeros(vocab_size, bool)
        self._is_stop_V[[token_id for token_id in stop_token_ids if token_id < vocab_size]] = True
        self.max_draft_tokens = policy.max_draft_tokens
        # Tokens by position: the context that was run, what was committed, and the candidates behind it.
        self._token_ids = np.zeros((num_slots, max_seq_len + policy.max_draft_tokens + 1), np.int64)
        self._num_committed = np.zeros(num_slots, np.int64)
        self._num_computed = np.zeros(num_slots, np.int64)
        self._num_drafted = np.zeros(num_slots, np.int64)
        self._num_steps = np.zeros(num_slots, np.int64)
        self._stream_keys = np.zeros(num_slots, np.int64)
        self._steps = DraftSteps()

    def draft(self, request: ProposalRequest) -> ProposalReply:
        """Draw the decisions, then candidates until a row's limit, a stop token, or its policy's end."""
        begin = time.perf_counter_ns()
        self._runner.update_pages(request.page_updates)
        self._settle(request)
        num_drafted_R, probabilities, num_passes = self._draft_blocks(request)
        slots_R = request.slots_R
        first_R = self._num_committed[slots_R]
        steps_C, rows_C = arange_segments(num_drafted_R), np.repeat(np.arange(len(slots_R)), num_drafted_R)
        return ProposalReply(
            decision_ids_R=self._token_ids[slots_R, first_R - 1],
            num_drafted_R=num_drafted_R,
            candidate_ids_C=self._token_ids[slots_R[rows_C], first_R[rows_C] + steps_C],
            draft_probabilities_C=probabilities[rows_C, steps_C],
            num_draft_passes=num_passes,
            times=RoleTimes(
                draft=time.perf_counter_ns() - begin,
                peak_memory_bytes=peak_memory_bytes(self.device),
            ),
        )

    def follow_contexts(self, request: ProposalRequest) -> RoleTimes:
        """Open the new rows and run the context tokens that the target runs in this round."""
        begin = time.perf_counter_ns()
        opened, context = request.opened, request.context
        self._stream_keys[opened.slots] = opened.stream_keys
        self._num_steps[opened.slots] = opened.num_steps
        self._num_drafted[opened.slots] = 0
        if not len(context):
            return RoleTimes()
        self._token_ids[context.slots_T, context.positions_T] = context.token_ids_T
        self._runner.forward(context, [])
        # Positions ascend within a slot, so the last write is the largest.
        self._num_computed[context.slots_T] = context.positions_T + 1
        self._num_committed[context.slots_T] = context.positions_T + 1
        return RoleTimes(prefill=time.perf_counter_ns() - begin)

    def _settle(self, request: ProposalRequest) -> None:
        """Commit the accepted candidates and the decision behind them."""
        slots_R = request.slots_R
        depths_R = request.num_accepted_R
        positions_R = self._num_committed[slots_R] + depths_R
        decision_ids_R = request.decision_ids_R.copy()
        drawn = np.flatnonzero(decision_ids_R == DRAW)
        if len(drawn):
            target_W = request.decisions_W
            assert isinstance(target_W, Dense)
            slots_W = slots_R[drawn]
            # Behind a fully accepted block the draft has no distribution: the residual is the target's own.
            draft_W = self._steps.at_rejections(slots_W, depths_R[drawn], like=target_W)
            uniforms_W = self._uniforms(slots_W, positions_R[drawn], self._num_steps[slots_W], Purpose.DECIDE)
            decision_ids_R[drawn] = target_W.residual(draft_W).draw(uniforms_W).cpu().numpy()
        self._token_ids[slots_R, positions_R] = decision_ids_R
        self._num_committed[slots_R] = positions_R + 1
        self._num_computed[slots_R] = np.minimum(self._num_computed[slots_R], positions_R)
        self._num_steps[slots_R] += 1

    def _draft_blocks(self, request: ProposalRequest) -> tuple[np.ndarray, np.ndarray, int]:
        """Number of candidates per row, probability of each [R, K], and the passes that it took."""
        self._steps = DraftSteps()
        slots_R = request.slots_R
        first_R = self._num_committed[slots_R]
        num_drafted_R = np.zeros(len(slots_R), np.int64)
        probabilities = np.zeros((len(slots_R), self.max_draft_tokens))
        stopped_R = self._is_stop_V[self._token_ids[slots_R, first_R - 1]]
        active_A = self._still_drafting(np.arange(len(slots_R)), 0, stopped_R, request)
        depth = 0
        while len(active_A):
            slots_A, positions_A = slots_R[active_A], first_R[active_A] + depth
            distributions_A = self._next_distributions(slots_A, positions_A)
            uniforms_A = None
            if not self._settings.is_greedy:
                uniforms_A = self._uniforms(slots_A, positions_A, self._num_steps[slots_A], Purpose.DRAFT)
            token_ids_A = distributions_A.draw(uniforms_A)
            probabilities[active_A, depth] = distributions_A.probabilities_of(token_ids_A).cpu().numpy()
            self._steps.append(slots_A, distributions_A)
            drawn_A = token_ids_A.cpu().numpy()
            self._token_ids[slots_A, positions_A] = drawn_A
            depth += 1
            num_drafted_R[active_A] = depth
            stopped_A = self._is_stop_V[drawn_A]
            active_A = self._still_drafting(active_A, depth, stopped_A, request)
        return num_drafted_R, probabilities, depth

    def _still_drafting(
        self, active_A: np.ndarray, depth: int, stopped_A: np.ndarray, request: ProposalRequest
    ) -> np.ndarray:
        wanted_A = self._policy.wants_more(request.slots_R[active_A], depth)
        return active_A[wanted_A & ~stopped_A & (depth < request.draft_limits_R[active_A])]

    def _next_distributions(self, slots_A: np.ndarray, ends_A: np.ndarray) -> Distributions:
        """Run each row's tokens up to ``end - 1`` that the cache lacks; distributions of what follows."""
        begins_A = self._num_computed[slots_A]
        lengths_A = ends_A - begins_A
        slots_T = np.repeat(slots_A, lengths_A)
        positions_T = np.repeat(begins_A, lengths_A) + arange_segments(lengths_A)
        batch = FlatBatch(self._token_ids[slots_T, positions_T], slots_T, positions_T)
        logits_AV = self._runner.forward(batch, np.cumsum(lengths_A) - 1)
        self._num_computed[slots_A] = ends_A
        return distributions_from_logits(logits_AV[:, : self._vocab_size], self._settings)

    def _uniforms(
        self, slots: np.ndarray, positions: np.ndarray, attempts: np.ndarray, purpose: Purpose
    ) -> Tensor:
        numbers = uniforms(
            torch.from_numpy(self._stream_keys[slots]),
            torch.from_numpy(positions),
            torch.from_numpy(attempts),
            purpose,
        )
        return numbers.to(self.device)
