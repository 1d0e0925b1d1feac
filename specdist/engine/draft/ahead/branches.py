"""Branches: alternative continuations, drafted for the case that the target rejects a drafted token.

While the target verifies a sequence's drafted tokens, the draft continues the likeliest alternatives to them,
each in a draft slot of its own. If the next token is one of them, its branch becomes the sequence's
candidates; without it there would be none for one pass. Branches change only what is ready, never what is
accepted: their tokens are drawn with the random numbers that the sequence would use after the miss.

A branch (position, alternative) is worth the probability that the drafted tokens are accepted up to that
position and the alternative becomes the next token there. Every sequence has the same number of branches and
chooses them by its own tokens alone, so that nothing depends on the rest of the batch.

S slots, N positions of all their drafted tokens, A alternatives, B branches, R sequences that decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specdist.engine.draft.steps.draft_features import Places
from specdist.engine.draft.steps.draft_state import NO_POSITION, DraftState
from specdist.engine.times.reports import AheadReport
from specdist.models.passes.runner import ModelRunner
from specdist.policies.payoff import RoundChooser, RoundShape
from specdist.sampling.branch_estimates import BranchEstimates, estimate_branches, likeliest
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.ranges import arange_segments, places_from

UNUSED = -1
# Beside logits of 0, a probability of 1.
CERTAIN_LOGIT = 1e4


class Branches(NamedTuple):
    """Branches to open.

    Attributes:
        slots_B, draft_slots_B: the slot that each branches off from, and its own one.
        positions_B, token_ids_B: where it begins, and with which token.
        chances_B: estimated probability that the branch will be needed.
    """

    slots_B: np.ndarray
    draft_slots_B: np.ndarray
    positions_B: np.ndarray
    token_ids_B: np.ndarray
    chances_B: np.ndarray


_NOTHING = np.zeros(0, np.int64)
NO_BRANCHES = Branches(_NOTHING, _NOTHING, _NOTHING, _NOTHING, np.zeros(0))


class BranchTable:
    """The open branches of every slot."""

    def __init__(self, num_slots: int, num_branches: int) -> None:
        self._num_slots = num_slots
        self.num_branches = num_branches
        shape = (num_slots, num_branches)
        self._positions = np.full(shape, UNUSED, np.int64)
        self._token_ids, self._lengths = np.zeros((2, *shape), np.int64)

    def choose(
        self,
        slots_S: np.ndarray,
        begins_S: np.ndarray,
        lengths_S: np.ndarray,
        branch_estimates: BranchEstimates,
        is_excluded_NA: np.ndarray,
        num_branches: int,
    ) -> Branches:
        """The best branches of every slot, at its ``lengths`` drafted tokens from position ``begins`` on."""
        offsets_N = arange_segments(lengths_S)
        lines_N = np.repeat(np.arange(len(slots_S)), lengths_S)
        num_positions, num_ids = int(lengths_S.max(initial=0)), branch_estimates.chances_NA.shape[1]
        survival = np.ones((len(slots_S), num_positions + 1))
        survival[lines_N, offsets_N + 1] = branch_estimates.survival_N
        reached = survival.cumprod(axis=1)[lines_N, offsets_N]
        scores = np.zeros((len(slots_S), num_positions, num_ids))
        chances_NA = np.where(is_excluded_NA, 0, branch_estimates.chances_NA)
        scores[lines_N, offsets_N] = reached[:, None] * chances_NA
        flat = scores.reshape(len(slots_S), -1)
        best = np.argsort(-flat, axis=1, kind="stable")[:, :num_branches]
        lines_B, places_B = np.nonzero(flat[np.arange(len(flat))[:, None], best] > 0)
        chosen_B = best[lines_B, places_B]
        offsets_B, columns_B = np.divmod(chosen_B, num_ids)
        index_B = (np.cumsum(lengths_S) - lengths_S)[lines_B] + offsets_B
        slots_B = slots_S[lines_B]
        return Branches(
            slots_B=slots_B,
            draft_slots_B=self._num_slots + slots_B * self.num_branches + places_B,
            positions_B=begins_S[lines_B] + offsets_B,
            token_ids_B=branch_estimates.alternative_ids_NA[index_B, columns_B],
            chances_B=flat[lines_B, chosen_B],
        )

    def open(self, branches: Branches, lengths_B: np.ndarray) -> None:
        """Record the branches, each with the number of tokens drafted after its first one."""
        if not len(branches.slots_B):
            return
        places = branches.slots_B, (branches.draft_slots_B - self._num_slots) % self.num_branches
        self._positions[places] = branches.positions_B
        self._token_ids[places] = branches.token_ids_B
        self._lengths[places] = lengths_B

    def find(
        self, slots_S: np.ndarray, positions_S: np.ndarray, token_ids_S: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[B]: the branches that begin at these positions with these tokens, at most one per slot: the index
        of the sequence among those looked up, the branch's own slot, and the tokens after its first one."""
        is_it = self._positions[slots_S] == positions_S[:, None]
        is_it &= self._token_ids[slots_S] == token_ids_S[:, None]
        lines, places = np.nonzero(is_it)
        slots = slots_S[lines]
        draft_slots = self._num_slots + slots * self.num_branches + places
        return lines, draft_slots, self._lengths[slots, places]

    def sizes(self, slots_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[S], [S]: each slot's open branches, and the tokens drafted in them."""
        is_open = self._positions[slots_S] != UNUSED
        return is_open.sum(axis=1), (self._lengths[slots_S] * is_open).sum(axis=1)

    def drop(self, slots_S: np.ndarray) -> None:
        """Close every branch of these slots."""
        self._positions[slots_S] = UNUSED


class LookedFor(NamedTuple):
    """Where branches may begin: the first place and the number of places of each sequence, all of them, and
    what the device finds there; None where there are to be no branches."""

    begins_S: np.ndarray
    lengths_S: np.ndarray
    places_N: Places
    likeliest_2NA: Tensor | None


class DraftBranches:
    """One draft's branches: looked for, opened, and, where the case has come about, adopted.

    A reply needs only the tokens of those adopted. Their keys and values follow while the target runs its
    pass, and so does the closing of all other branches.
    """

    def __init__(
        self,
        runner: ModelRunner,
        draft_state: DraftState,
        settings: SamplingSettings,
        chooser: RoundChooser | None,
        *,
        num_branches: int,
    ) -> None:
        """``chooser``: learns how many misses are caught; ``num_branches``: most of a sequence."""
        self._runner, self._draft_state, self._settings = runner, draft_state, settings
        self._chooser = chooser
        self.table = BranchTable(len(draft_state.num_committed), num_branches)
        self._after_reply: Callable[[], None] = lambda: None

    def look(self, slots_S: np.ndarray, num_ahead_S: np.ndarray, shape: RoundShape) -> LookedFor:
        """Let the device look for the likeliest tokens at every sequence's candidates and ``a_1``, which it
        may still have to draw: the places of a next token."""
        state = self._draft_state
        begins_S = state.num_committed[slots_S]
        lengths_S = state.num_candidates[slots_S] + np.minimum(num_ahead_S, 1)
        places_N = places_from(slots_S, begins_S, lengths_S)
        likeliest_2NA = None
        if shape.num_branches and shape.num_ahead > 1 and len(places_N[0]):
            # Of a forced token no alternatives are known; greedily drawn ones have logits.
            certainty = 1.0 if self._settings.is_random else CERTAIN_LOGIT
            scores_NV = state.scores.at(*places_N, certainty=certainty)
            likeliest_2NA = likeliest(scores_NV, self._settings, shape.num_branches)
        return LookedFor(begins_S, lengths_S, places_N, likeliest_2NA)

    def open(
        self, slots_S: np.ndarray, looked: LookedFor, shape: RoundShape, is_stop_V: np.ndarray
    ) -> Branches:
        """Open the best branches of every sequence, which are to be drafted."""
        if looked.likeliest_2NA is None:
            return NO_BRANCHES
        state, places_N = self._draft_state, looked.places_N
        branch_estimates = estimate_branches(looked.likeliest_2NA, state.token_ids[places_N], self._settings)
        is_last_N = places_N[1] + 2 >= state.max_lengths[places_N[0]]
        branches = self.table.choose(
            slots_S,
            looked.begins_S,
            looked.lengths_S,
            branch_estimates,
            # Nothing can follow a stop token, or the last token that a sequence may have.
            is_stop_V[branch_estimates.alternative_ids_NA] | is_last_N[:, None],
            shape.num_branches,
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
        self._runner.cache.open_branches(slots_B, draft_slots_B, positions_B)
        return branches

    def adopt(
        self, slots_R: np.ndarray, num_ahead_R: np.ndarray, is_hit_R: np.ndarray, num_branches: int
    ) -> AheadReport:
        """Let the branches that begin with this round's next tokens become the candidates, and close all
        others; what the reply does not need is left to :meth:`finish`. Returns the outcome of all work ahead.

        Args:
            num_ahead_R, is_hit_R: tokens drafted ahead, and whether the first one is the next token.
            num_branches: of a sequence, in the round that has drafted them.
        """
        state = self._draft_state
        report = dataclasses.replace(
            AheadReport.nothing(len(slots_R)), num_tokens_R=num_ahead_R, is_hit_R=is_hit_R
        )
        if not self.table.num_branches:
            return report
        num_branches_R, num_branch_tokens_R = self.table.sizes(slots_R)
        is_caught_R = np.zeros(len(slots_R), bool)
        positions_R = state.num_committed[slots_R] - 1
        # After a hit no branch is needed.
        wanted_R = np.where(is_hit_R, NO_POSITION, state.token_ids[slots_R, positions_R])
        index_B, draft_slots_B, lengths_B = self.table.find(slots_R, positions_R, wanted_R)
        if len(index_B):
            slots_B, positions_B = slots_R[index_B], positions_R[index_B]
            is_caught_R[index_B] = True
            num_branch_tokens_R[index_B] -= lengths_B
            sources = places_from(draft_slots_B, positions_B + 1, lengths_B)
            targets = places_from(slots_B, positions_B + 1, lengths_B)
            state.copy_drafted(sources, targets)
            # Forced tokens are in no cache before the next pass.
            computed_B = state.num_computed[draft_slots_B]
            state.num_computed[slots_B] = np.minimum(computed_B, positions_B + lengths_B)
            state.num_candidates[slots_B] = lengths_B

        def after_reply() -> None:
            if len(index_B):
                # The cache has the branch's first token, which is the next one, and all others but the last.
                slots_B, positions_B = slots_R[index_B], positions_R[index_B]
                self._runner.cache.adopt_branches(draft_slots_B, slots_B, positions_B, lengths_B)
            self.table.drop(slots_R)
            if self._chooser is not None:
                num_missed = int((~is_hit_R & (num_branches_R > 0)).sum())
                self._chooser.observe_misses(num_branches, num_missed, len(index_B))

        self._after_reply = after_reply
        return dataclasses.replace(
            report,
            num_branches_R=num_branches_R,
            num_branch_tokens_R=num_branch_tokens_R,
            is_caught_R=is_caught_R,
        )

    def finish(self) -> None:
        """Finish, before the next pass over these sequences."""
        after_reply, self._after_reply = self._after_reply, lambda: None
        after_reply()
