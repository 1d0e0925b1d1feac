"""Drafting ahead: what the draft does while the target verifies, instead of waiting.

It drafts on after each sequence's candidates. The first token, ``a_1``, stands in the place of the next
token; if the target accepts it, the tokens after it are the next candidates, drafted already. In *branches*
the draft continues the likeliest alternatives to the drafted tokens; if one of them becomes the next token,
its branch becomes the next candidates. Neither changes what is accepted: only what is ready.

R sequences that decode, W of them whose next token is sampled, S sequences that are drafted ahead of, B
branches, C or N tokens of several sequences, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdist.engine.draft.ahead.branches import DraftBranches
from specdist.engine.draft.steps.draft_loop import DraftLoop
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.draft.steps.draft_steps import DraftBatch
from specdist.engine.messages.proposals import DRAW, ProposalRequest
from specdist.models.passes.runner import ModelRunner
from specdist.policies import LengthPolicy, RoundContext
from specdist.policies.payoff import ALONE, RoundChooser, RoundShape
from specdist.sampling.distributions import SamplingSettings, accepted
from specdist.sampling.random import Purpose
from specdist.sampling.uploads import upload
from specdist.utils.ranges import places_from


class FirstAhead(NamedTuple):
    """The sequences' ``a_1``, in the places of their next tokens.

    Attributes:
        num_ahead_R: tokens drafted ahead, ``a_1`` among them.
        is_verified_R, is_hit_R: whether there was one and all candidates before it were accepted; whether it
            was accepted too.
    """

    num_ahead_R: np.ndarray
    is_verified_R: np.ndarray
    is_hit_R: np.ndarray

    @staticmethod
    @functools.cache
    def nothing(num_seqs: int) -> FirstAhead:
        """Where nothing is drafted ahead; nobody writes to it."""
        return FirstAhead(np.zeros(num_seqs, np.int64), *np.zeros((2, num_seqs), bool))


def verify_first(state: DraftState, request: ProposalRequest, positions_R: np.ndarray) -> FirstAhead:
    """Verify each sequence's ``a_1``, if it has one and all candidates before it were accepted.

    ``positions_R``: of the next tokens.
    """
    slots_R = request.slots_R
    num_ahead_R = state.num_ahead[slots_R]
    token_ids_R = state.token_ids[slots_R, positions_R]
    is_verified_R = (request.num_accepted_R == state.num_candidates[slots_R]) & (num_ahead_R > 0)
    is_hit_R = is_verified_R & (request.next_token_ids_R == token_ids_R)
    target_W = request.next_distributions_W
    if target_W is not None:
        drawn = np.flatnonzero(request.next_token_ids_R == DRAW)
        slots_W, positions_W = slots_R[drawn], positions_R[drawn]
        drafted_W = upload(target_W.device, token_ids_R[drawn])
        target_probabilities_W = target_W.probabilities_of(*drafted_W).cpu()
        draft_probabilities_W = state.probabilities[slots_W, positions_W]
        uniforms_W = state.random_keys(slots_W, positions_W).uniforms(Purpose.ACCEPT).numpy()
        is_accepted_W = accepted(target_probabilities_W.numpy(), draft_probabilities_W, uniforms_W)
        is_hit_R[drawn] = is_verified_R[drawn] & is_accepted_W
    return FirstAhead(num_ahead_R, is_verified_R, is_hit_R)


class AheadDrafter:
    """Drafts ahead, and keeps the branches. Does nothing where ``ahead`` has no tokens.

    ``ahead`` is what every round does, or the most that any may do where a ``chooser`` decides.
    """

    def __init__(
        self,
        runner: ModelRunner,
        ahead: RoundShape,
        chooser: RoundChooser | None,
        policy: LengthPolicy,
        draft_state: DraftState,
        draft_loop: DraftLoop,
        *,
        settings: SamplingSettings,
        max_tokens: int,
    ) -> None:
        """``max_tokens``: ahead of a sequence, or in a branch with its first token, with those that are
        forced."""
        self._runner = runner
        self.is_on = ahead.num_ahead > 0
        self._chooser = chooser
        # What the draft does in this round; without a chooser, in every round.
        self.shape = ahead
        self._draft_state = draft_state
        self._draft_loop = draft_loop
        self._forced = draft_loop.forced
        self._max_draft_tokens, self._max_ahead_tokens = policy.max_draft_tokens, max_tokens
        # Rounds in which the model does nothing, with this one.
        self._num_quiet = 0
        self._batch_policy = policy if policy.is_for_batch else None
        self.branches = DraftBranches(runner, draft_state, settings, chooser, num_branches=ahead.num_branches)

    def begin_round(self, request: ProposalRequest) -> None:
        """What to do before the reply, as was chosen after the last one, which must be resolved."""
        self._num_quiet = max(0, self._num_quiet - 1)
        if self._num_quiet:
            self.shape = ALONE
        elif self._chooser is not None:
            slots_R = request.slots_R
            is_pending = self._draft_state.num_candidates[slots_R].any() or request.num_redraft_R.any()
            self.shape = self._chooser.shape(*self._load(slots_R), is_pending=bool(is_pending))

    def _choose(self, request: ProposalRequest) -> None:
        """What to draft ahead now, and to do before the next reply."""
        if self._chooser is None:
            return
        slots_R = request.slots_R
        self._chooser.observe_pass(
            request.num_prefill_tokens, len(slots_R) + int(request.num_accepted_R.sum())
        )
        if self._num_quiet:
            return
        # In a round of prompts alone their sequences count: they are drafted ahead of at once.
        slots = slots_R if len(slots_R) else np.unique(request.context.slots_T)
        self._chooser.choose(*self._load(slots))
        self.shape = self._chooser.shape_ahead(
            self.shape, is_pending=bool(self._draft_state.num_candidates[slots_R].any())
        )

    def _load(self, slots: np.ndarray) -> tuple[int, float]:
        """Sequences, and the mean length of their contexts."""
        num_seqs = max(1, len(slots))
        return num_seqs, float(self._draft_state.num_committed[slots].sum() / num_seqs)

    def round_now(self, request: ProposalRequest) -> RoundContext:
        """The round's context for what is drafted before the reply."""
        return self._round(request, request.slots_R, len(request.slots_R), is_asynchronous=False)

    def _round(
        self, request: ProposalRequest, slots_S: np.ndarray, num_tokens: int, *, is_asynchronous: bool
    ) -> RoundContext:
        """``num_tokens``: of the target's pass, without prompts."""
        return RoundContext(
            num_rows=len(slots_S),
            num_pass_tokens=num_tokens + request.num_prefill_tokens,
            num_context_tokens=self._load(slots_S)[1],
            is_asynchronous=is_asynchronous,
            most_tokens=self.shape.num_ahead - 1 if is_asynchronous else None,
        )

    def wanted_now(self, request: ProposalRequest) -> list[tuple[np.ndarray, RoundContext | None]]:
        """The most candidates [R] to draft before the reply, and the round if the policy has a say; in one or
        several goes."""
        if not self.is_on:
            return [(request.draft_now_R, self.round_now(request))]
        redraft_R, wanted = request.num_redraft_R, list[tuple[np.ndarray, RoundContext | None]]()
        if redraft_R.any():
            wanted.append((redraft_R, None))
        if self._chooser is None or not self.shape.drafts_now:
            return wanted
        num_ready_R = self._draft_state.num_candidates[request.slots_R]
        room_R = np.where(redraft_R, 0, np.maximum(0, request.draft_now_R - num_ready_R))
        return [*wanted, (room_R, self.round_now(request))]

    def observe(self, num_accepted_R: np.ndarray, is_rejected_R: np.ndarray) -> None:
        """The target has verified so many accepted tokens of each sequence, and perhaps a rejected one."""
        if self._chooser is not None:
            self._chooser.observe(num_accepted_R, is_rejected_R)

    def num_rounds_alone(self, slots_R: np.ndarray) -> int:
        """Rounds in which the target need not ask; 0 while it has anything to verify. For forced tokens it
        asks in every round, and the model does nothing in these."""
        if self._forced is not None:
            self._num_quiet = self._num_quiet or self.shape.num_rounds_alone
            return 0
        is_pending = (
            self._draft_state.num_candidates[slots_R].any() or self._draft_state.num_ahead[slots_R].any()
        )
        return 0 if is_pending or self.shape.num_ahead else self.shape.num_rounds_alone

    def follow(self, request: ProposalRequest) -> None:
        """The target decodes alone: run the tokens that the cache lacks, without logits."""
        if self._chooser is not None:
            self._chooser.observe_pass(request.num_prefill_tokens, len(request.missed))
        self._catch_up(request.slots_R)

    def _catch_up(self, slots_R: np.ndarray) -> None:
        """Run what the cache lacks of these sequences' tokens."""
        if len(slots_R):
            state = self._draft_state
            ends_R = state.num_committed[slots_R]
            batch, _ = state.catch_up(slots_R, ends_R)
            self._runner.forward(batch, [])
            state.num_computed[slots_R] = ends_R

    def hold_back(self, request: ProposalRequest) -> None:
        """Candidates that are not worth the target's time, or have no room in its pass, are kept as tokens
        drafted ahead: the next round verifies them by the same rule. Forced ones come after the others."""
        if not self.is_on:
            return
        state, slots_R = self._draft_state, request.slots_R
        num_ready_R = state.num_candidates[slots_R]
        num_kept_R = state.num_with_free(slots_R, num_ready_R, self._max_draft_tokens)
        num_kept_R = np.minimum(num_kept_R, request.draft_now_R)
        if self._batch_policy is not None and self.shape.num_ahead:
            places_C = places_from(slots_R, state.num_committed[slots_R], num_ready_R)
            worth_R = self._batch_policy.num_to_verify(
                state.features.at(places_C), num_ready_R, self.round_now(request)
            )
            num_kept_R = np.minimum(num_kept_R, worth_R)
        state.num_candidates[slots_R] = num_kept_R
        state.num_ahead[slots_R] = num_ready_R - num_kept_R
        self._add_forced(request)

    def _add_forced(self, request: ProposalRequest) -> None:
        """Candidates that a constraint forces after those that are ready, without a pass."""
        if self._forced is None:
            return
        state, slots_R = self._draft_state, request.slots_R
        num_ready_R = state.num_candidates[slots_R]
        room_R = np.maximum(request.draft_now_R - num_ready_R, 0)
        room_R[state.num_ahead[slots_R] > 0] = 0
        tails_R = state.num_committed[slots_R] + num_ready_R
        state.num_candidates[slots_R] += self._forced.after(slots_R, tails_R, room_R)

    def draft(self, request: ProposalRequest, learn: Callable[[], None]) -> None:
        """Draft ``a_1`` of every sequence, then the tokens after it and its branches side by side; nothing in
        a round without work ahead.

        A sequence whose context is complete in the target's pass is drafted ahead of at once: its first token
        is a next token like any other. A resumed one is not: its next token was sampled before it was
        preempted.

        What to draft is chosen while ``a_1`` is drafted, which follows in any case where the rounds before
        have worked ahead. ``learn``: from the last round, where that is still to be done; called then, too.
        The policy is not asked about ``a_1``.
        """
        works_ahead_anyway = self.shape.num_ahead > 1
        if not works_ahead_anyway:
            self._choose(request)
        if not self.shape.num_ahead:
            learn()
            if self._num_quiet:
                self._catch_up(request.slots_R)
            return
        state, slots_S = self._draft_state, self._drafted_ahead_of(request)
        num_ready_S, num_left_S = state.num_candidates[slots_S], state.num_ahead[slots_S]
        tails_S = state.num_committed[slots_S] + num_ready_S + num_left_S
        room_S = np.maximum(state.max_lengths[slots_S] - tails_S - 1, 0)
        num_block_tokens = len(request.slots_R) + int(state.num_candidates[request.slots_R].sum())
        first = DraftBatch(
            draft_slots_R=slots_S,
            slots_R=slots_S,
            tails_R=tails_S,
            num_wanted_R=np.where(num_left_S, 0, np.minimum(room_S, 1)),
            reach_R=np.ones(len(slots_S)),
        )
        drafting = self._draft_loop.launch(first)
        if works_ahead_anyway:
            self._choose(request)
        # Before learning: the host waits once, for a_1 and for what follows from its scores. An a_1 whose
        # logits are not finite is among these places, and of no use there.
        num_expected_S = num_left_S + self._draft_loop.num_wanted(first)
        looked = self.branches.look(slots_S, num_expected_S, self.shape)
        learn()
        num_first_S = self._draft_loop.collect(drafting)
        state.num_ahead[slots_S] = num_ahead_S = num_left_S + num_first_S
        branches = self.branches.open(slots_S, looked, self.shape, self._draft_loop.is_stop_V)
        # a_1 is not a candidate, whether it was forced or not.
        num_free_S = state.num_free(slots_S, num_ready_S + num_ahead_S)
        num_free_S = num_free_S - state.num_free(slots_S, num_ready_S + np.minimum(num_ahead_S, 1))
        num_more_S = np.where(num_ahead_S > 0, np.maximum(self.shape.num_ahead - 1 - num_free_S, 0), 0)
        most_S = np.where(num_ahead_S > 0, np.maximum(self._max_ahead_tokens - num_ahead_S, 0), 0)
        num_in_branches_B = np.full(len(branches.slots_B), self.shape.num_ahead - 1)
        most_B = np.full(len(branches.slots_B), self._max_ahead_tokens - 1)
        slots_R = np.concatenate([slots_S, branches.slots_B])
        tails_R = np.concatenate([tails_S + num_first_S, branches.positions_B + 1])
        room_R = state.max_lengths[slots_R] - tails_R - 1
        num_drafted_R = self._draft_loop.extend(
            DraftBatch(
                draft_slots_R=np.concatenate([slots_S, branches.draft_slots_B]),
                slots_R=slots_R,
                tails_R=tails_R,
                num_wanted_R=np.minimum(np.concatenate([num_more_S, num_in_branches_B]), room_R),
                most_R=np.minimum(np.concatenate([most_S, most_B]), room_R),
                reach_R=np.concatenate([first.reach_R, branches.chances_B]),
                round=self._round(request, slots_S, num_block_tokens, is_asynchronous=True),
            )
        )
        state.num_ahead[slots_S] += num_drafted_R[: len(slots_S)]
        self.branches.table.open(branches, num_drafted_R[len(slots_S) :])

    def _drafted_ahead_of(self, request: ProposalRequest) -> np.ndarray:
        """Slots of the sequences that decode, and of those whose contexts are complete in this pass."""
        if not len(request.context):
            return request.slots_R
        state, contexts = self._draft_state, np.unique(request.context.slots_T)
        is_complete = state.num_committed[contexts] == state.context_lengths[contexts]
        return np.concatenate([request.slots_R, contexts[is_complete]])
