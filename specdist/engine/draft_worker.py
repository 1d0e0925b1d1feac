"""The draft's side of a round: sample the next tokens of the last round, then draft the next candidates.

After a sequence's committed tokens comes its *chain*: the candidates that the target is verifying, and after
them the tokens drafted ahead meanwhile (see draft_ahead.py; a draft that takes turns with the target has
none). The target's distribution after the accepted candidates resolves the chain, by the standard rule:

- The chain ends there: the bonus token is sampled from the distribution.
- The chain goes on with a token that the target has rejected: the recovered token is sampled from the
  residual.
- All candidates were accepted and the chain goes on with ``a_1``, drafted ahead: it is verified like any
  candidate. If it is accepted, it is the next token, and the rest of the chain are the next candidates.

A token that is not accepted is dropped with the rest of its chain. If a branch was prepared for the token in
its place, the branch becomes the chain.

R sequences that decode, W of them whose next token is sampled here, C tokens of several chains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from specdist.engine.device_clock import clock_of
from specdist.engine.draft_ahead import AheadDrafter
from specdist.engine.draft_loop import DraftBatch, DraftLoop
from specdist.engine.draft_state import NOWHERE, Chains, DraftState
from specdist.engine.histories import Histories, HistoriesSnapshot
from specdist.engine.proposals import (
    DRAW,
    DraftAhead,
    ProposalReply,
    ProposalRequest,
    RoleTimes,
    TracedDrafts,
)
from specdist.engine.timeline import Timeline
from specdist.models.memory import peak_memory_bytes, release_memory
from specdist.models.runner import ModelRunner
from specdist.policies import NUM_FEATURES, BatchPolicy, LengthPolicy, RoundContext, VerifiedTokens
from specdist.sampling.distributions import Dense, SamplingSettings
from specdist.sampling.rejection_sampler import (
    acceptance_probabilities,
    sample_next_tokens,
    verify_candidates,
)
from specdist.utils.ranges import arange_segments


@dataclass(frozen=True)
class _Resolution:
    """How the last round ended: the sequences whose ``a_1`` is the next token, and what a trace records."""

    is_hit_R: np.ndarray
    traced: TracedDrafts | None


@dataclass(frozen=True)
class _Snapshot:
    """What a request that fails has changed and the sequences need when they are opened again."""

    histories: HistoriesSnapshot
    stream_keys: np.ndarray


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
        num_slots: int,
        max_seq_len: int,
        ahead: DraftAhead | None = None,
        is_traced: bool = False,
        clock: Timeline | None = None,
    ) -> None:
        """With branches, the runner must have been allocated with branch rows.

        ``clock``: by default one on which all time outside this model's work is idle.
        """
        self._runner = runner
        self.device = runner.device
        ahead = ahead or DraftAhead()
        self._draft_state = DraftState(
            num_rows=num_slots * (1 + ahead.num_branches),
            max_length=max_seq_len + policy.max_draft_tokens + ahead.num_tokens + 1,
            vocab_size=vocab_size,
            device=runner.device,
        )
        self._chains = Chains(num_slots)
        self._batch_policy = policy if isinstance(policy, BatchPolicy) else None
        self._histories = Histories(policy, num_slots)
        self._draft_loop = DraftLoop(
            runner,
            policy,
            self._draft_state,
            self._histories,
            settings=settings,
            vocab_size=vocab_size,
            stop_token_ids=stop_token_ids,
            keeps_scores=ahead.num_branches > 0,
            is_traced=is_traced,
        )
        self._ahead = AheadDrafter(
            runner,
            ahead,
            self._draft_state,
            self._chains,
            self._draft_loop,
            batch_policy=self._batch_policy,
            settings=settings,
        )
        self._is_traced = is_traced
        self._clock = clock or Timeline("idle", clock=clock_of(runner.device))
        self._before = self._snapshot()

    def respond(self, request: ProposalRequest) -> ProposalReply:
        """Resolve the last round; the next candidates are those drafted ahead, and those drafted now."""
        self._before = self._snapshot()
        with self._clock.phase("draft"):
            reply = self._respond(request)
        times = RoleTimes(**self._clock.take(), peak_memory_bytes=peak_memory_bytes(self.device))
        return dataclasses.replace(reply, times=times)

    def _respond(self, request: ProposalRequest) -> ProposalReply:
        self._runner.update_pages(request.page_updates)
        draft_state, chains, slots_R = self._draft_state, self._chains, request.slots_R
        pending = self._ahead.pending(slots_R)
        resolution = self._resolve(request)
        branch_ranks_R = self._ahead.adopt_branches(slots_R, resolution.is_hit_R)
        # Without a draft that works ahead, this is the whole round's drafting. With one, only resumed
        # sequences draft now: as many candidates as before their preemption, whatever the policy would say
        # today.
        chains.num_candidates[slots_R] += self._draft_loop.extend(
            DraftBatch.of_slots(
                slots_R,
                chains.num_committed[slots_R] + chains.num_candidates[slots_R],
                request.draft_now_R,
                RoundContext(
                    num_rows=len(slots_R),
                    num_pass_tokens=len(slots_R) + len(request.context),
                    is_ahead=False,
                ),
                uses_policy=not self._ahead.is_on,
            )
        )
        self._ahead.hold_back(slots_R, num_other_tokens=len(slots_R) + len(request.context))
        num_candidates_R = chains.num_candidates[slots_R]
        first_R = chains.num_committed[slots_R]
        places_C = chains.places(slots_R, first_R, num_candidates_R)
        traced = resolution.traced
        if traced is not None:
            traced = dataclasses.replace(traced, features_4C=draft_state.features_at(places_C).stacked())
        pass_sizes, num_head_tokens = self._draft_loop.take_counts()
        return ProposalReply(
            next_token_ids_R=draft_state.token_ids[slots_R, first_R - 1],
            num_drafted_R=num_candidates_R,
            candidate_ids_C=draft_state.token_ids[places_C],
            draft_probabilities_C=draft_state.probabilities[places_C],
            ahead=pending.report(resolution.is_hit_R, branch_ranks_R),
            draft_pass_sizes_P=np.array(pass_sizes, np.int64),
            times=RoleTimes(),
            num_head_tokens=num_head_tokens,
            traced=traced,
        )

    def prefill_and_draft_ahead(self, request: ProposalRequest) -> None:
        """After the reply, while the target runs its pass: run the contexts of that pass, then draft ahead.

        A sequence whose context is complete is drafted ahead of at once: its first token is a next token like
        any other. A resumed one is not: its next token was sampled before it was preempted.
        """
        with self._clock.phase("prefill"):
            self._open(request)
            self._prefill(request)
        if not self._ahead.is_on:
            return
        with self._clock.phase("draft"):
            chains = self._chains
            contexts = np.unique(request.context.slots_T)
            complete = contexts[chains.num_committed[contexts] == chains.context_lengths[contexts]]
            num_pass_tokens = len(request.slots_R) + int(chains.num_candidates[request.slots_R].sum())
            self._ahead.draft(
                np.r_[request.slots_R, complete].astype(np.int64), num_pass_tokens + len(request.context)
            )

    def recover(self, *, has_replied: bool) -> None:
        """The last request failed for lack of memory, before or after the reply: every sequence will be
        opened again. Without a reply, all sequences return to their state before the request."""
        if not has_replied:
            self._histories.restore(self._before.histories)
            self._draft_state.stream_keys = self._before.stream_keys
        nothing = np.zeros(0, np.int64)
        self._draft_state.forget_scores_but((nothing, nothing))
        release_memory(self.device)

    def _snapshot(self) -> _Snapshot:
        return _Snapshot(self._histories.snapshot(), self._draft_state.stream_keys.copy())

    def _open(self, request: ProposalRequest) -> None:
        """Put the preempted sequences' histories aside, and begin the new sequences."""
        opened, stream_keys = request.opened, self._draft_state.stream_keys
        self._histories.suspend(request.suspended_slots, stream_keys[request.suspended_slots])
        self._histories.open(opened.slots, opened.stream_keys)
        stream_keys[opened.slots] = opened.stream_keys
        self._draft_state.num_misses[opened.slots] = opened.num_misses
        self._chains.max_lengths[opened.slots] = opened.max_lengths
        self._chains.context_lengths[opened.slots] = opened.context_lengths
        self._chains.num_candidates[opened.slots] = 0
        self._chains.num_ahead[opened.slots] = 0
        self._ahead.drop_branches(opened.slots)

    def _prefill(self, request: ProposalRequest) -> None:
        context = request.context
        if not len(context):
            return
        context_ids_T = np.asarray(context.token_ids_T)
        self._draft_state.put_undrafted((context.slots_T, context.positions_T), context_ids_T)
        self._runner.forward(context, [])
        # Positions ascend within a slot, so the last write is the largest.
        self._draft_state.num_computed[context.slots_T] = context.positions_T + 1
        self._chains.num_committed[context.slots_T] = context.positions_T + 1

    def _resolve(self, request: ProposalRequest) -> _Resolution:
        """Commit the accepted candidates and the next token after them."""
        draft_state, chains = self._draft_state, self._chains
        slots_R, num_accepted_R = request.slots_R, request.num_accepted_R
        begins_R = chains.num_committed[slots_R]
        self._histories.observe(slots_R, chains.num_candidates[slots_R], num_accepted_R)
        positions_R = begins_R + num_accepted_R
        is_full_R = num_accepted_R == chains.num_candidates[slots_R]
        is_verified_R = is_full_R & (chains.num_ahead[slots_R] > 0)
        is_rejected_R = ~is_full_R
        next_token_ids_R = request.next_token_ids_R.copy()
        is_known_R = next_token_ids_R != DRAW
        drafted_R = draft_state.token_ids[slots_R, positions_R]
        is_hit_R = is_verified_R & is_known_R & (next_token_ids_R == drafted_R)
        acceptance_R = is_hit_R.astype(np.float64)
        drawn = np.flatnonzero(~is_known_R)
        if len(drawn):
            target_W = request.next_distributions_W
            assert isinstance(target_W, Dense)
            slots_W, positions_W = slots_R[drawn], positions_R[drawn]
            keys_W = draft_state.random_keys(slots_W, positions_W)
            drafted_W = torch.from_numpy(drafted_R[drawn]).to(self.device)
            target_probabilities_W = target_W.probabilities_of(drafted_W).cpu()
            draft_probabilities_W = torch.from_numpy(draft_state.probabilities[slots_W, positions_W])
            accepted_W = verify_candidates(target_probabilities_W, draft_probabilities_W, keys_W).numpy()
            is_hit_R[drawn] = is_verified_R[drawn] & accepted_W
            acceptance_R[drawn] = acceptance_probabilities(target_probabilities_W, draft_probabilities_W)
            is_rejected_W = (is_rejected_R | is_verified_R)[drawn] & ~is_hit_R[drawn]
            draft_W = Dense(draft_state.scores_at(slots_W, np.where(is_rejected_W, positions_W, NOWHERE)))
            sampled_W = sample_next_tokens(target_W, keys_W, draft_W).cpu().numpy()
            next_token_ids_R[drawn] = np.where(is_hit_R[drawn], drafted_R[drawn], sampled_W)
        chains.num_committed[slots_R] = positions_R + 1
        chains.num_candidates[slots_R] = np.where(is_hit_R, chains.num_ahead[slots_R] - 1, 0)
        chains.num_ahead[slots_R] = 0
        draft_state.num_misses[slots_R] += (is_rejected_R | is_verified_R) & ~is_hit_R
        self._observe_verified(
            slots_R, begins_R, num_accepted_R, num_accepted_R + (is_rejected_R | is_verified_R), is_hit_R
        )
        kept_R = np.where(is_hit_R, draft_state.num_computed[slots_R], positions_R)
        draft_state.num_computed[slots_R] = np.minimum(draft_state.num_computed[slots_R], kept_R)
        traced = None
        if self._is_traced:
            traced = TracedDrafts(
                features_4C=np.zeros((NUM_FEATURES, 0)),
                is_verified_R=is_verified_R,
                is_hit_R=is_hit_R,
                token_ids_R=drafted_R,
                features_4R=draft_state.features_at((slots_R, positions_R)).stacked(),
                acceptance_R=acceptance_R,
            )
        replaced = np.flatnonzero(~is_hit_R)
        draft_state.put_undrafted((slots_R[replaced], positions_R[replaced]), next_token_ids_R[replaced])
        return _Resolution(is_hit_R, traced)

    def _observe_verified(
        self,
        slots_R: np.ndarray,
        begins_R: np.ndarray,
        num_accepted_R: np.ndarray,
        num_verified_R: np.ndarray,
        is_hit_R: np.ndarray,
    ) -> None:
        """Let a policy that learns from single tokens see which of the chains' verified tokens were accepted.

        A chain's token in the place of the next token was verified too, unless the chain ends before it.
        """
        if self._batch_policy is None:
            return
        depths_C = arange_segments(num_verified_R)
        num_good_C = np.repeat(num_accepted_R + is_hit_R, num_verified_R)
        places_C = self._chains.places(slots_R, begins_R, num_verified_R)
        self._batch_policy.observe_tokens(
            VerifiedTokens(
                features=self._draft_state.features_at(places_C),
                depths_C=depths_C,
                is_accepted_C=depths_C < num_good_C,
            )
        )


class ColocatedDraft:
    """The proposer of a draft in the target's own process: target and draft take turns."""

    def __init__(self, draft: DraftWorker) -> None:
        self._draft = draft

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock  # the target is idle all the while
        try:
            reply = self._draft.respond(request)
            self._draft.prefill_and_draft_ahead(request)
        except (RuntimeError, MemoryError):
            self._draft.recover(has_replied=False)
            raise
        return reply

    def close(self) -> None:
        """Nothing to do: no other rank waits."""
