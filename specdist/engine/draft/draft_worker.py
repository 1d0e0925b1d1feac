"""The draft's side of a round: sample the next tokens of the last round, then draft the next candidates.

The target's distribution after the accepted candidates gives the next token: the *recovered* token, sampled
from the residual, if a candidate was rejected there; else the *bonus* token, sampled from P itself.

A draft that works ahead (draft_ahead.py) has drafted on after the candidates. If all of them were accepted,
its first token stands in the next token's place and is verified like any candidate: on a *hit* it is the next
token, and those after it are the next candidates. A draft that takes turns with the target never has a hit.

A drafter of the target's states takes turns. Its requests bring the states of the tokens committed since the
last one. In a round's first step it runs again what the target has accepted, now with the target's states in
the place of its own; in the other steps the state of each drafted token is what its own step has put out.

R sequences that decode, W of them whose next token is sampled here, C tokens of several sequences, one after
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import numpy as np

from specdist.engine.draft.ahead.draft_ahead import AheadDrafter, FirstAhead, verify_first
from specdist.engine.draft.lazy_prefill import LazyPrefill
from specdist.engine.draft.steps.draft_loop import DraftLoop
from specdist.engine.draft.steps.draft_state import NO_POSITION, DraftState
from specdist.engine.draft.steps.draft_steps import DraftBatch
from specdist.engine.draft.steps.policy_state import Feedback, PolicyState
from specdist.engine.messages.proposals import DRAW, ProposalReply, ProposalRequest
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.engine.times.reports import RoleTimes
from specdist.engine.times.timeline import Timeline, clock_of
from specdist.models.drafters.runner import DrafterRunner
from specdist.models.loading.memory import peak_memory_bytes
from specdist.models.passes.runner import ModelRunner
from specdist.policies import LengthPolicy
from specdist.policies.payoff import RoundChooser, RoundShape
from specdist.sampling.distributions import NextDraws, SamplingSettings
from specdist.sampling.processing.processors import TokenMasker
from specdist.utils.ranges import places_from


class DraftWorker:
    """State per slot; every method works on all sequences at once."""

    def __init__(
        self,
        runner: ModelRunner,
        policy: LengthPolicy,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        stop_token_ids: Collection[int],
        scheduling: SchedulerSettings,
        ahead: RoundShape,
        chooser: RoundChooser | None,
        is_traced: bool,
        clock: Timeline | None,
        masker: TokenMasker | None,
        lazy_pages: tuple[int, int] | None,
    ) -> None:
        """The runner must have been allocated with slots for branches, if there are any.

        ``scheduling``: the limits of the batch, which hold for a pass over contexts, too.
        ``chooser`` chooses every round's work, at most that of ``ahead``. ``clock``: by default one on which
        all time outside this model's work is idle. ``masker``: the draft's own, where tokens may be masked.
        ``lazy_pages``: number and size of the target's pages, if prompts are to be run only when something is
        drafted after them.
        """
        self._runner, self.device, self._is_traced = runner, runner.device, is_traced
        # With prefixes that other sequences share, a draft with recurrent layers has more to run than the
        # target.
        self._max_context_tokens, num_slots = scheduling.max_num_batched_tokens, scheduling.num_slots
        self._draft_state = DraftState(
            num_slots=num_slots,
            num_branches=ahead.num_branches,
            max_length=scheduling.max_seq_len + policy.max_draft_tokens + ahead.num_ahead + 1,
            vocab_size=vocab_size,
            device=runner.device,
        )
        self._policy_state = PolicyState(policy, num_slots)
        self._pipeline: LogitsPipeline | None = None
        if settings.processing is not None:
            # The tokens are those that the draft keeps anyway.
            self._pipeline = LogitsPipeline(
                settings, self._draft_state.token_ids, num_slots=num_slots, vocab_size=vocab_size,
                device=runner.device, masker=masker,
            )  # fmt: skip
        self._draft_loop = DraftLoop(
            runner,
            policy,
            self._draft_state,
            self._policy_state,
            settings=settings,
            vocab_size=vocab_size,
            stop_token_ids=stop_token_ids,
            keeps_scores=ahead.num_branches > 0,
            is_traced=is_traced,
            pipeline=self._pipeline,
        )
        self._ahead = AheadDrafter(
            runner, ahead, chooser, policy, self._draft_state, self._draft_loop,
            settings=settings, max_tokens=max(ahead.num_ahead, scheduling.num_ahead_tokens),
        )  # fmt: skip
        self._clock = clock or Timeline("idle", clock=clock_of(runner.device))
        self._peak_memory_bytes = 0
        self._feedback = Feedback(self._draft_state, self._policy_state, policy, self._ahead.observe)
        self._drafter = runner if isinstance(runner, DrafterRunner) else None
        self._lazy: LazyPrefill | None = None
        if lazy_pages is not None:
            assert policy.is_for_batch and not self._ahead.is_on
            num_pages, page_size = lazy_pages
            self._lazy = LazyPrefill(
                runner, self._draft_state, policy,
                num_pages=num_pages, page_size=page_size, max_tokens=self._max_context_tokens,
            )  # fmt: skip
            self._draft_state.prefill_lazily = self._lazy.run

    @property
    def is_lazy(self) -> bool:
        """Whether it need not be asked in rounds that are faster without it."""
        return self._lazy is not None

    def respond(self, request: ProposalRequest) -> ProposalReply:
        """Resolve the last round; the next candidates are those drafted ahead, and those drafted now."""
        with self._clock.phase("draft"):
            reply = self._respond(request)
        # Events of a device are read while the target is at work.
        times = self._clock.counted() if self._runner.is_asynchronous else self._clock.take()
        return reply(times=RoleTimes(**times, peak_memory_bytes=self._peak_memory_bytes))

    def _respond(self, request: ProposalRequest) -> Callable[..., ProposalReply]:
        """The reply without its times."""
        if self._drafter is not None:
            # Before the page table changes: they are of the last pass.
            if request.states is not None:
                self._drafter.receive(*request.states.places_C, request.states.states_CS)
            self._drafter.drop_waiting()
        if self._lazy is not None:
            self._lazy.follow(request)
        self._runner.update_pages(request.page_updates)
        state, slots_R = self._draft_state, request.slots_R
        first = self._resolve(request)
        num_branches = self._ahead.shape.num_branches
        report = self._ahead.branches.adopt(slots_R, first.num_ahead_R, first.is_hit_R, num_branches)
        self._ahead.begin_round(request)
        first_R = state.num_committed[slots_R]
        wanted_now = self._ahead.wanted_now(request)
        if wanted_now:
            self._feedback.learn()
            self._draft_state.forget_verified(request.slots_R)
        # A draft that takes turns does all its drafting here; one that works ahead, only that of resumed
        # sequences: as many candidates as before their preemption, whatever the policy would say today.
        for num_wanted_R, round in wanted_now:
            self._ahead.branches.finish()
            state.num_candidates[slots_R] += self._draft_loop.extend(
                DraftBatch(
                    draft_slots_R=slots_R,
                    slots_R=slots_R,
                    tails_R=first_R + state.num_candidates[slots_R],
                    num_wanted_R=num_wanted_R,
                    reach_R=np.ones(len(slots_R)),
                    put_off=None if self._lazy is None else self._lazy.put_off(slots_R),
                    round=round,
                )
            )
        self._ahead.hold_back(request)
        num_rounds_alone = self._ahead.num_rounds_alone(slots_R)
        if self._lazy is not None:
            num_rounds_alone = self._lazy.num_rounds_alone(request)
        num_candidates_R = state.num_candidates[slots_R]
        places_C = places_from(slots_R, first_R, num_candidates_R)
        pass_sizes_P, draft_steps = self._draft_loop.pass_counts.take()
        return partial(
            ProposalReply,
            next_token_ids_R=state.token_ids[slots_R, first_R - 1],
            num_drafted_R=num_candidates_R,
            candidate_ids_C=state.token_ids[places_C],
            draft_probabilities_C=state.probabilities[places_C],
            ahead=report,
            draft_pass_sizes_P=pass_sizes_P,
            draft_steps=draft_steps,
            num_rounds_alone=num_rounds_alone,
            features_3C=state.features.at(places_C).stacked if self._is_traced else None,
        )

    def _resolve(self, request: ProposalRequest) -> FirstAhead:
        """Commit the accepted candidates and the next token after them."""
        state, slots_R, num_accepted_R = self._draft_state, request.slots_R, request.num_accepted_R
        self._draft_state.commit(request.missed)
        num_candidates_R = state.num_candidates[slots_R]
        begins_R = state.num_committed[slots_R]
        positions_R = begins_R + num_accepted_R
        first = FirstAhead.nothing(len(slots_R))
        if self._ahead.is_on:
            first = verify_first(state, request, positions_R)
        is_hit_R = first.is_hit_R
        is_rejected_R = ((num_accepted_R < num_candidates_R) | first.is_verified_R) & ~is_hit_R
        self._feedback.keep(slots_R, num_accepted_R, is_hit_R, is_rejected_R)
        next_token_ids_R, target_W = request.next_token_ids_R, request.next_distributions_W
        if target_W is not None:
            next_token_ids_R = next_token_ids_R.copy()
            drawn = np.flatnonzero(next_token_ids_R == DRAW)
            slots_W, positions_W = slots_R[drawn], positions_R[drawn]
            scored_W = np.where(is_rejected_R[drawn], positions_W, NO_POSITION)
            keys_W = state.random_keys(slots_W, positions_W)
            draws = NextDraws(target_W, keys_W, *state.scores.rows(slots_W, scored_W), slots_W)
            next_token_ids_R[drawn] = self._draft_loop.next_tokens(draws, must_be_known=self._ahead.is_on)
        state.num_committed[slots_R] = positions_R + 1
        state.num_candidates[slots_R] = np.where(is_hit_R, state.num_ahead[slots_R] - 1, 0)
        state.num_ahead[slots_R] = 0
        state.num_misses[slots_R] += is_rejected_R
        kept_R = np.where(is_hit_R, state.num_computed[slots_R], positions_R)
        if self._drafter is not None:
            # What was drafted has been run with the draft's own states.
            kept_R = begins_R
        state.num_computed[slots_R] = np.minimum(state.num_computed[slots_R], kept_R)
        sampled = (~is_hit_R).nonzero()[0]
        state.token_ids[slots_R[sampled], positions_R[sampled]] = next_token_ids_R[sampled]
        return first

    def prefill_and_draft_ahead(self, request: ProposalRequest) -> None:
        """Run the pass's contexts after the reply, while the target runs it, then draft ahead. Learning waits
        until the device has that to do, unless a head reads the features of the last tokens."""
        self._ahead.branches.finish()
        if self._runner.head is not None:
            self._feedback.learn()
        self._draft_state.forget_verified(request.slots_R)
        with self._clock.phase("prefill"):
            self._open_and_prefill(request)
        with self._clock.phase("draft"):
            self._ahead.draft(request, self._feedback.learn)
        self._peak_memory_bytes = peak_memory_bytes(self.device)
        self._clock.settle()

    def follow(self, request: ProposalRequest) -> None:
        """A round in which the draft was not asked: run what its cache lacks, and the contexts."""
        with self._clock.phase("prefill"):
            if self._lazy is not None:
                self._lazy.follow(request)
            self._runner.update_pages(request.page_updates)
            self._draft_state.commit(request.missed)
            self._open_and_prefill(request)
            if self._lazy is None:
                self._ahead.follow(request)

    def _open_and_prefill(self, request: ProposalRequest) -> None:
        """Put the preempted sequences' histories aside, begin the new sequences, and run the contexts."""
        state, opened = self._draft_state, request.opened
        if len(request.suspended_slots):
            self._policy_state.suspend(request.suspended_slots, state.stream_keys[request.suspended_slots])
        if len(opened.slots):
            self._policy_state.open(opened.slots, opened.stream_keys)
            state.open(opened)
            self._ahead.branches.table.drop(opened.slots)
            if self._pipeline is not None:
                self._pipeline.open(opened)
        for context in request.context.parts(self._max_context_tokens):
            state.commit(context)
            if self._lazy is not None:
                self._lazy.keep(context)
                continue
            self._runner.forward(context, [])
            state.num_computed[context.slots_T] = context.positions_T + 1
