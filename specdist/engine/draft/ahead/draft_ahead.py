"""Drafting ahead: what the draft does while the target verifies, instead of waiting.

It drafts on after each sequence's candidates. The first token, ``a_1``, stands in the place of the next
token; if the target accepts it, the tokens after it are the next candidates, drafted already. In *branches*
the draft continues the likeliest alternatives to the drafted tokens; if one of them becomes the next token,
its branch becomes the next candidates. Neither changes what is accepted: only what is ready.

R sequences that decode, W of them whose next token is sampled, S sequences that are drafted ahead of, B
branches, C or N tokens of several sequences, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specdist.engine.draft.ahead.adoption import BranchAdoption
from specdist.engine.draft.ahead.branches import NO_BRANCHES, Branches, BranchTable
from specdist.engine.draft.ahead.first_ahead import FirstAhead, verify_first
from specdist.engine.draft.steps.draft_loop import DraftLoop
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.draft.steps.draft_steps import DraftBatch
from specdist.engine.messages.proposals import ProposalRequest
from specdist.engine.times.reports import AheadReport
from specdist.models.passes.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner
from specdist.policies import BatchPolicy, LengthPolicy, RoundContext
from specdist.policies.payoff import ALONE, RoundChooser, RoundShape
from specdist.sampling.branch_estimates import estimate_branches, likeliest
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.ranges import places_from

# Beside logits of 0, a probability of 1.
CERTAIN_LOGIT = 1e4


class _BranchPlaces(NamedTuple):
    """Where branches may begin: the first place and the number of places of each sequence, all of them, and
    what the device finds there; None where there are to be no branches."""

    begins_S: np.ndarray
    lengths_S: np.ndarray
    places_N: tuple[np.ndarray, np.ndarray]
    likeliest_2NA: Tensor | None


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
        is_traced: bool,
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
        self._batch_policy = policy if isinstance(policy, BatchPolicy) else None
        self._settings = settings
        self._is_traced = is_traced
        self._branches = BranchTable(len(draft_state.num_committed), ahead.num_branches)
        self.adoption = BranchAdoption(runner, draft_state, self._branches, chooser)

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
        """For what is drafted before the reply."""
        return self._round(request, request.slots_R, len(request.slots_R), is_ahead=False)

    def _round(
        self, request: ProposalRequest, slots_S: np.ndarray, num_tokens: int, *, is_ahead: bool
    ) -> RoundContext:
        """``num_tokens``: of the target's pass, without prompts."""
        return RoundContext(
            num_rows=len(slots_S),
            num_pass_tokens=num_tokens + request.num_prefill_tokens,
            num_context_tokens=self._load(slots_S)[1],
            is_ahead=is_ahead,
            most_tokens=self.shape.num_ahead - 1 if is_ahead else None,
        )

    def wanted_now(self, request: ProposalRequest) -> list[tuple[np.ndarray, bool]]:
        """The most candidates [R] to draft before the reply, and whether the policy has a say; in one or
        several goes."""
        if not self.is_on:
            return [(request.draft_now_R, True)]
        redraft_R = request.num_redraft_R
        if self._chooser is None or not self.shape.drafts_now:
            return [(redraft_R, False)] if redraft_R.any() else []
        num_ready_R = self._draft_state.num_candidates[request.slots_R]
        room_R = np.where(redraft_R, 0, np.maximum(0, request.draft_now_R - num_ready_R))
        return [(redraft_R, False), (room_R, True)] if redraft_R.any() else [(room_R, True)]

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

    def take_missed(self, missed: FlatBatch) -> None:
        """Next tokens that the target has sampled alone, without anything drafted."""
        if len(missed):
            places, state = (missed.slots_T, missed.positions_T), self._draft_state
            state.put_undrafted(places, np.asarray(missed.token_ids_T))
            # Positions ascend within a slot, so the last write is the largest.
            state.num_committed[missed.slots_T] = missed.positions_T + 1
            state.num_candidates[missed.slots_T] = state.num_ahead[missed.slots_T] = 0

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

    def verify_first(self, request: ProposalRequest, positions_R: np.ndarray) -> FirstAhead:
        """See :func:`specdist.engine.draft.ahead.first_ahead.verify_first`."""
        return verify_first(
            self._draft_state, request, positions_R, is_on=self.is_on, is_traced=self._is_traced
        )

    def drop_branches(self, slots: np.ndarray) -> None:
        self._branches.drop(slots)

    def adopt_branches(self, slots_R: np.ndarray, first: FirstAhead) -> AheadReport:
        """See :meth:`BranchAdoption.adopt`. Without work ahead, nothing; returns the outcome of all work
        ahead."""
        if not self.is_on:
            return AheadReport.nothing(len(slots_R))
        return self.adoption.adopt(slots_R, first, self.shape.num_branches)

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
        has_chosen = self.shape.num_ahead < 2
        if has_chosen:
            self._choose(request)
        if not self.shape.num_ahead:
            learn()
            if self._num_quiet:
                self._catch_up(request.slots_R)
            return
        state = self._draft_state
        slots_S = request.slots_R
        if len(request.context):
            contexts = np.unique(request.context.slots_T)
            complete = contexts[state.num_committed[contexts] == state.context_lengths[contexts]]
            slots_S = np.concatenate([slots_S, complete])
        num_block_tokens = len(request.slots_R) + int(state.num_candidates[request.slots_R].sum())
        num_left_S = state.num_ahead[slots_S]
        tails_S = state.num_committed[slots_S] + state.num_candidates[slots_S] + num_left_S
        room_S = state.max_lengths[slots_S] - tails_S - 1
        asked: list[_BranchPlaces] = []

        def choose() -> None:
            nonlocal has_chosen
            if not has_chosen:
                has_chosen = True
                self._choose(request)

        def meanwhile() -> None:
            choose()
            # Before learning: the host waits once, for a_1 and for what follows from its scores.
            if not asked:
                asked.append(self._ask_branches(slots_S, num_left_S + self._draft_loop.num_wanted(first)))
            learn()

        round_ahead = partial(self._round, request, slots_S, num_block_tokens, is_ahead=True)
        first = DraftBatch(
            draft_slots_R=slots_S,
            slots_R=slots_S,
            tails_R=tails_S,
            num_wanted_R=np.where(num_left_S, 0, np.minimum(np.maximum(room_S, 0), 1)),
            reach_R=np.ones(len(slots_S)),
            round=round_ahead,
            uses_policy=False,
            meanwhile=meanwhile,
        )
        num_first_S = self._draft_loop.extend(first)
        choose()
        learn()
        state.num_ahead[slots_S] = num_ahead_S = num_left_S + num_first_S
        # Where the loop had no time in between; else an a_1 whose logits were not finite is among the places,
        # and of no use there.
        branches = self._choose_branches(
            slots_S, asked[0] if asked else self._ask_branches(slots_S, num_ahead_S)
        )
        num_ready_S = state.num_candidates[slots_S]
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
                round=round_ahead,
            )
        )
        state.num_ahead[slots_S] += num_drafted_R[: len(slots_S)]
        self._branches.open(branches, num_drafted_R[len(slots_S) :])

    def _ask_branches(self, slots_S: np.ndarray, num_ahead_S: np.ndarray) -> _BranchPlaces:
        """Let the device look for the likeliest tokens at every sequence's candidates and ``a_1``, which it
        may still have to draw: the places of a next token."""
        state, num_branches = self._draft_state, self.shape.num_branches
        begins_S = state.num_committed[slots_S]
        lengths_S = state.num_candidates[slots_S] + np.minimum(num_ahead_S, 1)
        places_N = places_from(slots_S, begins_S, lengths_S)
        likeliest_2NA = None
        if num_branches and self.shape.num_ahead > 1 and len(places_N[0]):
            # Of a forced token no alternatives are known; greedily drawn ones have logits.
            certainty = 1.0 if self._settings.is_random else CERTAIN_LOGIT
            scores_NV = state.scores.at(*places_N, certainty=certainty)
            likeliest_2NA = likeliest(scores_NV, self._settings, num_branches)
        return _BranchPlaces(begins_S, lengths_S, places_N, likeliest_2NA)

    def _choose_branches(self, slots_S: np.ndarray, asked: _BranchPlaces) -> Branches:
        """Open the best branches of every sequence."""
        if asked.likeliest_2NA is None:
            return NO_BRANCHES
        state, num_branches, places_N = self._draft_state, self.shape.num_branches, asked.places_N
        branch_estimates = estimate_branches(asked.likeliest_2NA, state.token_ids[places_N], self._settings)
        is_last_N = places_N[1] + 2 >= state.max_lengths[places_N[0]]
        branches = self._branches.choose(
            slots_S,
            asked.begins_S,
            asked.lengths_S,
            branch_estimates,
            # Nothing can follow a stop token, or the last token that a sequence may have.
            self._draft_loop.is_stop_V[branch_estimates.alternative_ids_NA] | is_last_N[:, None],
            num_branches,
        )
        draft_slots_B, slots_B, positions_B = branches.draft_slots_B, branches.slots_B, branches.positions_B
        if self._settings.processing is not None:
            state.copy_prefixes(slots_B, draft_slots_B, positions_B)
        state.put_undrafted((draft_slots_B, positions_B), branches.token_ids_B)
        state.stream_keys[draft_slots_B] = state.stream_keys[slots_B]
        # A branch is what the sequence would draft after one more miss, with the same random numbers.
        state.num_misses[draft_slots_B] = state.num_misses[slots_B] + 1
        # Forced tokens before it that no pass has run yet are the branch's to run, too.
        state.num_computed[draft_slots_B] = np.minimum(positions_B, state.num_computed[slots_B])
        self._runner.open_branches(slots_B, draft_slots_B, positions_B)
        return branches
