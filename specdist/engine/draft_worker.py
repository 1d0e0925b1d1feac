"""The draft's side of a round: resolve the last one, draft the next candidates, and draft ahead of them.

After a row's committed tokens stands its *chain*: the candidates that the target is verifying, and after
them the tokens drafted ahead while it does. The target's distribution at the next-token position (the one
after the accepted candidates) resolves the chain here, by the standard rule:

- The chain has no token there: the bonus token is drawn from it.
- It has one that the target has rejected: the recovered token is drawn from the residual.
- All candidates were accepted and ``a_1`` stands there, drafted ahead: it is verified like any candidate. If
  it is accepted it is the next token, and the rest of the chain are the next candidates, already drafted.

Whatever is not accepted takes the rest of its chain with it. If a branch was prepared for the token that took
its place, the branch becomes the chain.

R rows that decode, W of them whose next token is drawn here, N positions of several chains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from specdist.engine.branches import NO_BRANCHES, BranchBook, Branches
from specdist.engine.device_clock import clock_of
from specdist.engine.draft_loop import DraftBatch, DraftLoop
from specdist.engine.draft_state import NOWHERE, NUM_FEATURES, DraftState
from specdist.engine.histories import Histories
from specdist.engine.proposals import (
    DRAW,
    DraftAhead,
    ProposalReply,
    ProposalRequest,
    RoleTimes,
    TracedDrafts,
)
from specdist.engine.timeline import Timeline
from specdist.models.flat import arange_segments
from specdist.models.memory import peak_memory_bytes, release_memory
from specdist.models.runner import ModelRunner
from specdist.policies import BatchPolicy, LengthPolicy, RoundContext, VerifiedTokens
from specdist.sampling.acceptance import accepted_flags
from specdist.sampling.branch_estimates import BranchEstimates, estimate_branches
from specdist.sampling.distributions import Dense, SamplingSettings
from specdist.sampling.random import Purpose, uniforms


class DraftWorker:
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
        ahead: DraftAhead | None = None,
        is_traced: bool = False,
        clock: Timeline | None = None,
    ) -> None:
        """With branches the runner must have been given room for them.

        ``clock``: by default one on which all that is not this model's work is idle.
        """
        self._runner = runner
        self.device = runner.device
        self._settings = settings
        self._ahead = ahead or DraftAhead()
        num_branches = self._ahead.num_branches
        self._rows = DraftState(
            num_rows=num_slots * (1 + num_branches),
            max_length=max_seq_len + policy.max_draft_tokens + self._ahead.num_tokens + 1,
            vocab_size=vocab_size,
            device=runner.device,
        )
        self._branches = BranchBook(num_slots, num_branches)
        self._batch_policy = policy if isinstance(policy, BatchPolicy) else None
        self._histories = Histories(policy, num_slots)
        self._draft_loop = DraftLoop(
            runner,
            policy,
            self._rows,
            self._histories,
            settings=settings,
            vocab_size=vocab_size,
            stop_token_ids=stop_token_ids,
            keeps_scores=num_branches > 0,
            is_traced=is_traced,
        )
        self._is_traced = is_traced
        self._num_committed = np.zeros(num_slots, np.int64)
        self._num_candidates = np.zeros(num_slots, np.int64)
        self._num_ahead = np.zeros(num_slots, np.int64)
        self._max_lengths = np.zeros(num_slots, np.int64)
        self._context_lengths = np.zeros(num_slots, np.int64)
        self._clock = clock or Timeline("idle", clock=clock_of(runner.device))
        self._before = self._histories.snapshot(), self._rows.stream_keys.copy()

    def respond(self, request: ProposalRequest) -> ProposalReply:
        """Resolve the last round; the next candidates are those ready, and those asked for now."""
        self._before = self._histories.snapshot(), self._rows.stream_keys.copy()
        with self._clock.phase("draft"):
            reply = self._respond(request)
        times = RoleTimes(**self._clock.take(), peak_memory_bytes=peak_memory_bytes(self.device))
        return dataclasses.replace(reply, times=times)

    def _respond(self, request: ProposalRequest) -> ProposalReply:
        self._runner.update_pages(request.page_updates)
        slots_R = request.slots_R
        num_ahead_R = self._num_ahead[slots_R]
        num_branches_R = self._branches.num_open(slots_R)
        num_branch_tokens_R = self._branches.num_tokens(slots_R)
        is_hit_R, traced = self._resolve(request)
        branch_ranks_R = self._adopt_branches(slots_R, is_hit_R)
        tails_R = self._num_committed[slots_R] + self._num_candidates[slots_R]
        # Ahead only a resumed row is drafted for now: as long a block as before, which is behind what its
        # history says by now.
        self._num_candidates[slots_R] += self._draft_loop.extend(
            DraftBatch.of_slots(
                slots_R,
                tails_R,
                request.draft_now_R,
                RoundContext(
                    num_rows=len(slots_R),
                    num_pass_tokens=len(slots_R) + len(request.context),
                    is_ahead=False,
                ),
                asks_policy=not self._ahead.num_tokens,
            )
        )
        self._leave_out(slots_R, num_other_tokens=len(slots_R) + len(request.context))
        num_candidates_R = self._num_candidates[slots_R]
        first_R = self._num_committed[slots_R]
        places_C = self._places(slots_R, first_R, num_candidates_R)
        if traced is not None:
            traced = dataclasses.replace(traced, features_4C=self._rows.features_at(places_C).stacked())
        pass_sizes, num_head_tokens = self._draft_loop.take_counts()
        return ProposalReply(
            next_token_ids_R=self._rows.token_ids[slots_R, first_R - 1],
            num_drafted_R=num_candidates_R,
            candidate_ids_C=self._rows.token_ids[places_C],
            draft_probabilities_C=self._rows.probabilities[places_C],
            num_ahead_R=num_ahead_R,
            is_hit_R=is_hit_R,
            num_branches_R=num_branches_R,
            num_branch_tokens_R=num_branch_tokens_R,
            branch_ranks_R=branch_ranks_R,
            draft_pass_sizes_P=np.array(pass_sizes, np.int64),
            times=RoleTimes(),
            num_head_tokens=num_head_tokens,
            traced=traced,
        )

    def follow(self, request: ProposalRequest) -> None:
        """While the target runs its pass: run the contexts that it runs, then draft ahead of every row.

        A row whose context ends here is drafted ahead of at once: its first token is a next token like any
        other. A resumed one is not: its next token was drawn before it was preempted.
        """
        with self._clock.phase("prefill"):
            self._follow_contexts(request)
        if not self._ahead.num_tokens:
            return
        with self._clock.phase("draft"):
            contexts = np.unique(request.context.slots_T)
            ended = contexts[self._num_committed[contexts] == self._context_lengths[contexts]]
            num_pass_tokens = len(request.slots_R) + int(self._num_candidates[request.slots_R].sum())
            self._draft_ahead(
                np.r_[request.slots_R, ended].astype(np.int64), num_pass_tokens + len(request.context)
            )

    def abandon(self, *, is_heard: bool) -> None:
        """The last request could not be served for lack of memory: every row will be opened again.

        ``is_heard``: it has been answered. Else its rows go back to where they were before it.
        """
        if not is_heard:
            histories, self._rows.stream_keys = self._before
            self._histories.restore(histories)
        nothing = np.zeros(0, np.int64)
        self._rows.forget_scores_but((nothing, nothing))
        release_memory(self.device)

    def _follow_contexts(self, request: ProposalRequest) -> None:
        opened, context = request.opened, request.context
        self._histories.suspend(request.suspended_slots, self._rows.stream_keys[request.suspended_slots])
        self._histories.open(opened.slots, opened.stream_keys)
        self._rows.stream_keys[opened.slots] = opened.stream_keys
        self._rows.num_misses[opened.slots] = opened.num_misses
        self._max_lengths[opened.slots] = opened.max_lengths
        self._context_lengths[opened.slots] = opened.context_lengths
        self._num_candidates[opened.slots] = 0
        self._num_ahead[opened.slots] = 0
        self._branches.drop(opened.slots)
        if not len(context):
            return
        context_ids_T = np.asarray(context.token_ids_T)
        self._rows.put_undrafted((context.slots_T, context.positions_T), context_ids_T)
        self._runner.forward(context, [])
        # Positions ascend within a slot, so the last write is the largest.
        self._rows.num_computed[context.slots_T] = context.positions_T + 1
        self._num_committed[context.slots_T] = context.positions_T + 1

    def _resolve(self, request: ProposalRequest) -> tuple[np.ndarray, TracedDrafts | None]:
        """Commit the accepted candidates and the next token after them. True for rows whose ``a_1`` was it;
        and what a trace tells of ``a_1``."""
        rows = self._rows
        slots_R, num_accepted_R = request.slots_R, request.num_accepted_R
        begins_R = self._num_committed[slots_R]
        self._histories.observe(slots_R, self._num_candidates[slots_R], num_accepted_R)
        positions_R = self._num_committed[slots_R] + num_accepted_R
        is_full_R = num_accepted_R == self._num_candidates[slots_R]
        is_verified_R = is_full_R & (self._num_ahead[slots_R] > 0)
        is_rejected_R = ~is_full_R
        next_token_ids_R = request.next_token_ids_R.copy()
        is_known_R = next_token_ids_R != DRAW
        drafted_R = rows.token_ids[slots_R, positions_R]
        is_hit_R = is_verified_R & is_known_R & (next_token_ids_R == drafted_R)
        acceptance_R = is_hit_R.astype(np.float64)
        drawn = np.flatnonzero(~is_known_R)
        if len(drawn):
            target_W = request.next_distributions_W
            assert isinstance(target_W, Dense)
            slots_W, positions_W = slots_R[drawn], positions_R[drawn]
            uniforms_W = self._uniforms(slots_W, positions_W, Purpose.ACCEPT)
            drafted_W = torch.from_numpy(drafted_R[drawn])
            target_probabilities_W = target_W.probabilities_of(drafted_W.to(self.device)).cpu()
            draft_probabilities_W = torch.from_numpy(rows.probabilities[slots_W, positions_W])
            flags_W = accepted_flags(target_probabilities_W, draft_probabilities_W, uniforms_W)
            is_hit_R[drawn] = is_verified_R[drawn] & flags_W.numpy()
            # Where nothing is verified there may be nothing to divide by, and nothing is read.
            nonzero_W = np.where(is_verified_R[drawn], draft_probabilities_W.numpy(), 1.0)
            acceptance_R[drawn] = np.minimum(1.0, target_probabilities_W.numpy() / nonzero_W)
            is_rejected_W = (is_rejected_R | is_verified_R)[drawn] & ~is_hit_R[drawn]
            # Where nothing was rejected the residual of the target's distribution and zeros is that
            # distribution: the bonus.
            draft_W = Dense(rows.scores_at(slots_W, np.where(is_rejected_W, positions_W, NOWHERE)))
            next_ids_W = target_W.residual(draft_W).draw(
                self._uniforms(slots_W, positions_W, Purpose.NEXT_TOKEN).to(self.device)
            )
            next_token_ids_R[drawn] = np.where(is_hit_R[drawn], drafted_R[drawn], next_ids_W.cpu().numpy())
        self._num_committed[slots_R] = positions_R + 1
        self._num_candidates[slots_R] = np.where(is_hit_R, self._num_ahead[slots_R] - 1, 0)
        self._num_ahead[slots_R] = 0
        rows.num_misses[slots_R] += (is_rejected_R | is_verified_R) & ~is_hit_R
        if self._batch_policy is not None:
            # A chain's token at the next-token position was verified too, unless the chain ends before it.
            num_verified_R = num_accepted_R + (is_rejected_R | is_verified_R)
            places_C = self._places(slots_R, begins_R, num_verified_R)
            depths_C = arange_segments(num_verified_R)
            num_good_C = np.repeat(num_accepted_R + is_hit_R, num_verified_R)
            self._batch_policy.observe_tokens(
                VerifiedTokens(
                    features=rows.features_at(places_C),
                    depths_C=depths_C,
                    is_accepted_C=depths_C < num_good_C,
                )
            )
        kept_R = np.where(is_hit_R, rows.num_computed[slots_R], positions_R)
        rows.num_computed[slots_R] = np.minimum(rows.num_computed[slots_R], kept_R)
        traced = None
        if self._is_traced:
            traced = TracedDrafts(
                features_4C=np.zeros((NUM_FEATURES, 0)),
                is_verified_R=is_verified_R,
                is_hit_R=is_hit_R,
                token_ids_R=drafted_R,
                features_4R=rows.features_at((slots_R, positions_R)).stacked(),
                acceptance_R=acceptance_R,
            )
        replaced = np.flatnonzero(~is_hit_R)
        rows.put_undrafted((slots_R[replaced], positions_R[replaced]), next_token_ids_R[replaced])
        return is_hit_R, traced

    def _adopt_branches(self, slots_R: np.ndarray, is_hit_R: np.ndarray) -> np.ndarray:
        """Let the branches of this round's next tokens become their rows' chains, and close all others.

        Returns the rank [R] of the alternative with which each adopted branch began, 0 where there is none.
        """
        ranks_R = np.zeros(len(slots_R), np.int64)
        positions_R = self._num_committed[slots_R] - 1
        # A chain that goes on needs none: branches begin with other tokens than the chain's.
        found, branches_B, lengths_B = self._branches.find(
            slots_R, positions_R, np.where(is_hit_R, NOWHERE, self._rows.token_ids[slots_R, positions_R])
        )
        if len(found):
            slots_B, decided_B = slots_R[found], positions_R[found]
            ranks_R[found] = self._branches.ranks(slots_B, branches_B)
            self._rows.adopt(branches_B, slots_B, decided_B + 1, lengths_B)
            # The last token of a branch has not been run, but the next token before them all has.
            self._runner.adopt_branches(branches_B, slots_B, decided_B, lengths_B)
            self._rows.num_computed[slots_B] = decided_B + lengths_B
            self._num_candidates[slots_B] = lengths_B
        self._branches.drop(slots_R)
        self._rows.forget_scores_but(
            self._places(slots_R, self._num_committed[slots_R], self._num_candidates[slots_R])
        )
        return ranks_R

    def _leave_out(self, slots_R: np.ndarray, num_other_tokens: int) -> None:
        """What a row has ready beyond what the target's time is worth stays after its candidates, as tokens
        that were drafted ahead: the next round verifies it by the same rule."""
        if self._batch_policy is None or not self._ahead.num_tokens:
            return
        num_ready_R = self._num_candidates[slots_R]
        places_C = self._places(slots_R, self._num_committed[slots_R], num_ready_R)
        num_kept_R = self._batch_policy.num_to_verify(
            self._rows.features_at(places_C), num_ready_R, num_other_tokens
        )
        self._num_candidates[slots_R] = num_kept_R
        self._num_ahead[slots_R] = num_ready_R - num_kept_R

    def _draft_ahead(self, slots_S: np.ndarray, num_pass_tokens: int) -> None:
        """``a_1`` of every row; then the rest of its chain and its branches side by side."""
        round = RoundContext(num_rows=len(slots_S), num_pass_tokens=num_pass_tokens, is_ahead=True)
        num_left_S = self._num_ahead[slots_S]
        tails_S = self._num_committed[slots_S] + self._num_candidates[slots_S] + num_left_S
        room_S = self._max_lengths[slots_S] - tails_S - 1
        num_first_S = self._draft_loop.extend(
            DraftBatch.of_slots(
                slots_S, tails_S, np.where(num_left_S, 0, np.minimum(1, room_S)), round, asks_policy=False
            )
        )
        self._num_ahead[slots_S] = num_ahead_S = num_left_S + num_first_S
        branches = self._choose_branches(slots_S, np.minimum(num_ahead_S, 1))
        num_more_S = np.where(num_ahead_S > 0, np.maximum(self._ahead.num_tokens - num_ahead_S, 0), 0)
        tails_S = tails_S + num_first_S
        draft_batch = DraftBatch(
            rows_R=np.r_[slots_S, branches.rows_B],
            slots_R=np.r_[slots_S, branches.slots_B],
            tails_R=np.r_[tails_S, branches.positions_B + 1],
            num_wanted_R=np.r_[num_more_S, np.full(len(branches.slots_B), self._ahead.num_tokens - 1)],
            reach_R=np.r_[np.ones(len(slots_S)), branches.chances_B],
            round=round,
        )
        room_R = self._max_lengths[draft_batch.slots_R] - draft_batch.tails_R - 1
        num_drafted_R = self._draft_loop.extend(
            dataclasses.replace(draft_batch, num_wanted_R=np.minimum(draft_batch.num_wanted_R, room_R))
        )
        self._num_ahead[slots_S] += num_drafted_R[: len(slots_S)]
        self._branches.open(branches, num_drafted_R[len(slots_S) :])

    def _choose_branches(self, slots_S: np.ndarray, num_first_S: np.ndarray) -> Branches:
        """Open the best branches of every row's candidates and ``a_1``, where a next token may fall."""
        begins_S = self._num_committed[slots_S]
        lengths_S = self._num_candidates[slots_S] + num_first_S
        places_N = self._places(slots_S, begins_S, lengths_S)
        if not self._branches.num_branches or self._ahead.num_tokens == 1 or not len(places_N[0]):
            return NO_BRANCHES
        branch_estimates = self._branch_estimates_at(places_N)
        is_last_N = places_N[1] + 2 >= self._max_lengths[places_N[0]]
        branches = self._branches.choose(
            slots_S,
            begins_S,
            lengths_S,
            branch_estimates,
            # Nothing can follow these.
            self._draft_loop.is_stop_V[branch_estimates.alternative_ids_NA] | is_last_N[:, None],
        )
        rows = self._rows
        rows.put_undrafted((branches.rows_B, branches.positions_B), branches.token_ids_B)
        rows.stream_keys[branches.rows_B] = rows.stream_keys[branches.slots_B]
        # A branch is what the row would draft after one more miss, so it draws the same numbers.
        rows.num_misses[branches.rows_B] = rows.num_misses[branches.slots_B] + 1
        rows.num_computed[branches.rows_B] = branches.positions_B
        self._runner.open_branches(branches.slots_B, branches.rows_B, branches.positions_B)
        return branches

    def _branch_estimates_at(self, places_N: tuple[np.ndarray, np.ndarray]) -> BranchEstimates:
        return estimate_branches(
            self._rows.scores_at(*places_N),
            self._rows.token_ids[places_N],
            self._settings,
            self._branches.num_branches,
        )

    def _places(
        self, slots_S: np.ndarray, begins_S: np.ndarray, lengths_S: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slot and position of every token of the slots' stretches, one after the other."""
        return np.repeat(slots_S, lengths_S), np.repeat(begins_S, lengths_S) + arange_segments(lengths_S)

    def _uniforms(self, slots: np.ndarray, positions: np.ndarray, purpose: Purpose) -> Tensor:
        return uniforms(
            torch.from_numpy(self._rows.stream_keys[slots]),
            torch.from_numpy(positions),
            torch.from_numpy(self._rows.num_misses[slots]),
            purpose,
        )
