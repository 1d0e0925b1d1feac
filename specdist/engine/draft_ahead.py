"""Drafting ahead: what the draft does while the target verifies, instead of waiting.

It continues each sequence's chain: ``a_1`` stands in the place of the next token, and if the target accepts
it, the tokens after it are the next candidates, drafted already. In *branches* it continues the likeliest
alternatives to the chain's tokens; if one of them becomes the next token, its branch becomes the chain.
Neither changes what is accepted: only what is ready.

R sequences that decode, S sequences that are drafted ahead of, B branches, C or N tokens of several chains,
one after the other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from specdist.engine.branches import NO_BRANCHES, Branches, BranchTable
from specdist.engine.draft_loop import DraftBatch, DraftLoop
from specdist.engine.draft_state import NOWHERE, Chains, DraftState
from specdist.engine.proposals import AheadReport, DraftAhead
from specdist.models.runner import ModelRunner
from specdist.policies import BatchPolicy, RoundContext
from specdist.sampling.branch_estimates import BranchEstimates, estimate_branches
from specdist.sampling.distributions import SamplingSettings


@dataclass(frozen=True)
class PendingAhead:
    """What has been drafted ahead for each sequence before the round is resolved."""

    num_tokens_R: np.ndarray
    num_branches_R: np.ndarray
    num_branch_tokens_R: np.ndarray

    def report(self, is_hit_R: np.ndarray, branch_ranks_R: np.ndarray) -> AheadReport:
        """With the outcome."""
        return AheadReport(
            num_tokens_R=self.num_tokens_R,
            is_hit_R=is_hit_R,
            num_branches_R=self.num_branches_R,
            num_branch_tokens_R=self.num_branch_tokens_R,
            branch_ranks_R=branch_ranks_R,
        )


class AheadDrafter:
    """Drafts ahead, and keeps the branches. Does nothing where ``ahead`` has no tokens."""

    def __init__(
        self,
        runner: ModelRunner,
        ahead: DraftAhead,
        draft_state: DraftState,
        chains: Chains,
        draft_loop: DraftLoop,
        *,
        batch_policy: BatchPolicy | None,
        settings: SamplingSettings,
    ) -> None:
        self._runner = runner
        self._ahead = ahead
        self._draft_state = draft_state
        self._chains = chains
        self._draft_loop = draft_loop
        self._batch_policy = batch_policy
        self._settings = settings
        self._branches = BranchTable(chains.num_slots, ahead.num_branches)

    @property
    def is_on(self) -> bool:
        return self._ahead.num_tokens > 0

    def pending(self, slots_R: np.ndarray) -> PendingAhead:
        """What is ready, for the report of what became of it."""
        return PendingAhead(
            self._chains.num_ahead[slots_R],
            self._branches.num_open(slots_R),
            self._branches.num_tokens(slots_R),
        )

    def drop_branches(self, slots: np.ndarray) -> None:
        self._branches.drop(slots)

    def adopt_branches(self, slots_R: np.ndarray, is_hit_R: np.ndarray) -> np.ndarray:
        """Let the branches that begin with this round's next tokens become the chains, and close all others.

        Returns the rank [R] of the alternative with which each adopted branch began, 0 where there is none.
        """
        ranks_R = np.zeros(len(slots_R), np.int64)
        positions_R = self._chains.num_committed[slots_R] - 1
        # A chain that goes on needs no branch.
        found = self._branches.find(
            slots_R,
            positions_R,
            np.where(is_hit_R, NOWHERE, self._draft_state.token_ids[slots_R, positions_R]),
        )
        branches_B, lengths_B = found.rows_B, found.lengths_B
        if len(branches_B):
            slots_B, positions_B = slots_R[found.index_B], positions_R[found.index_B]
            ranks_R[found.index_B] = self._branches.ranks(slots_B, branches_B)
            self._draft_state.adopt(branches_B, slots_B, positions_B + 1, lengths_B)
            # The cache has the branch's first token, which is the next token, and all others but the last.
            self._runner.adopt_branches(branches_B, slots_B, positions_B, lengths_B)
            self._draft_state.num_computed[slots_B] = positions_B + lengths_B
            self._chains.num_candidates[slots_B] = lengths_B
        self._branches.drop(slots_R)
        self._draft_state.forget_scores_but(
            self._chains.places(
                slots_R, self._chains.num_committed[slots_R], self._chains.num_candidates[slots_R]
            )
        )
        return ranks_R

    def hold_back(self, slots_R: np.ndarray, num_other_tokens: int) -> None:
        """Candidates that are not worth the target's time stay in the chain as tokens drafted ahead: the next
        round verifies them by the same rule."""
        if self._batch_policy is None or not self.is_on:
            return
        num_ready_R = self._chains.num_candidates[slots_R]
        places_C = self._chains.places(slots_R, self._chains.num_committed[slots_R], num_ready_R)
        num_kept_R = self._batch_policy.num_to_verify(
            self._draft_state.features_at(places_C), num_ready_R, num_other_tokens
        )
        self._chains.num_candidates[slots_R] = num_kept_R
        self._chains.num_ahead[slots_R] = num_ready_R - num_kept_R

    def draft(self, slots_S: np.ndarray, num_pass_tokens: int) -> None:
        """Draft ``a_1`` of every sequence, then the rest of its chain and its branches side by side."""
        round = RoundContext(num_rows=len(slots_S), num_pass_tokens=num_pass_tokens, is_ahead=True)
        num_left_S = self._chains.num_ahead[slots_S]
        tails_S = self._chains.num_committed[slots_S] + self._chains.num_candidates[slots_S] + num_left_S
        room_S = self._chains.max_lengths[slots_S] - tails_S - 1
        num_first_S = self._draft_loop.extend(
            DraftBatch.of_slots(
                slots_S, tails_S, np.where(num_left_S, 0, np.minimum(1, room_S)), round, uses_policy=False
            )
        )
        self._chains.num_ahead[slots_S] = num_ahead_S = num_left_S + num_first_S
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
        room_R = self._chains.max_lengths[draft_batch.slots_R] - draft_batch.tails_R - 1
        num_drafted_R = self._draft_loop.extend(
            dataclasses.replace(draft_batch, num_wanted_R=np.minimum(draft_batch.num_wanted_R, room_R))
        )
        self._chains.num_ahead[slots_S] += num_drafted_R[: len(slots_S)]
        self._branches.open(branches, num_drafted_R[len(slots_S) :])

    def _choose_branches(self, slots_S: np.ndarray, num_first_S: np.ndarray) -> Branches:
        """Open the best branches of every sequence, at its candidates and ``a_1``: the places of a next
        token."""
        begins_S = self._chains.num_committed[slots_S]
        lengths_S = self._chains.num_candidates[slots_S] + num_first_S
        places_N = self._chains.places(slots_S, begins_S, lengths_S)
        if not self._branches.num_branches or self._ahead.num_tokens == 1 or not len(places_N[0]):
            return NO_BRANCHES
        branch_estimates = self._branch_estimates_at(places_N)
        is_last_N = places_N[1] + 2 >= self._chains.max_lengths[places_N[0]]
        branches = self._branches.choose(
            slots_S,
            begins_S,
            lengths_S,
            branch_estimates,
            # Nothing can follow a stop token, or the last token that a sequence may have.
            self._draft_loop.is_stop_V[branch_estimates.alternative_ids_NA] | is_last_N[:, None],
        )
        draft_state = self._draft_state
        draft_state.put_undrafted((branches.rows_B, branches.positions_B), branches.token_ids_B)
        draft_state.stream_keys[branches.rows_B] = draft_state.stream_keys[branches.slots_B]
        # A branch is what the sequence would draft after one more miss, with the same random numbers.
        draft_state.num_misses[branches.rows_B] = draft_state.num_misses[branches.slots_B] + 1
        draft_state.num_computed[branches.rows_B] = branches.positions_B
        self._runner.open_branches(branches.slots_B, branches.rows_B, branches.positions_B)
        return branches

    def _branch_estimates_at(self, places_N: tuple[np.ndarray, np.ndarray]) -> BranchEstimates:
        return estimate_branches(
            self._draft_state.scores_at(*places_N),
            self._draft_state.token_ids[places_N],
            self._settings,
            self._branches.num_branches,
        )
