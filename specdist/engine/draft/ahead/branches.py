"""Branches: alternative continuations, drafted for the case that the target rejects a drafted token.

While the target verifies a sequence's drafted tokens, the draft continues the likeliest alternatives to them,
each in a draft slot of its own. If the next token is one of them, its branch becomes the sequence's
candidates; without it there would be none for one pass. Branches change only what is ready, never what is
accepted: their tokens are drawn with the random numbers that the sequence would use after the miss.

A branch (position, alternative) is worth the probability that the drafted tokens are accepted up to that
position and the alternative becomes the next token there. Every sequence has the same number of branches and
chooses them by its own tokens alone, so that nothing depends on the rest of the batch.

S slots, N positions of all their drafted tokens, A alternatives, B branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdist.sampling.branch_estimates import BranchEstimates
from specdist.utils.ranges import arange_segments

UNUSED = -1


@dataclass(frozen=True)
class Branches:
    """Branches to open.

    Attributes:
        slots_B, draft_slots_B: the slot that each branches off from, and its own one.
        positions_B, token_ids_B: where it begins, and with which token.
        ranks_B: rank (from 1) of that token among the alternatives at its position.
        chances_B: estimated probability that the branch will be needed.
    """

    slots_B: np.ndarray
    draft_slots_B: np.ndarray
    positions_B: np.ndarray
    token_ids_B: np.ndarray
    ranks_B: np.ndarray
    chances_B: np.ndarray


_NOTHING = np.zeros(0, np.int64)
NO_BRANCHES = Branches(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, np.zeros(0))


@dataclass(frozen=True)
class FoundBranches:
    """Branches that begin with a next token.

    ``index_B``: index of the sequence among those looked up; ``draft_slots_B``: the branch's own slot;
    ``lengths_B``: number of tokens after the next token.
    """

    index_B: np.ndarray
    draft_slots_B: np.ndarray
    lengths_B: np.ndarray


class BranchTable:
    """The open branches of every slot."""

    def __init__(self, num_slots: int, num_branches: int) -> None:
        self._num_slots = num_slots
        self.num_branches = num_branches
        shape = (num_slots, num_branches)
        self._positions = np.full(shape, UNUSED, np.int64)
        self._token_ids = np.zeros(shape, np.int64)
        self._ranks = np.zeros(shape, np.int64)
        self._lengths = np.zeros(shape, np.int64)

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
        # Its rank counts the alternatives up to its column: the drawn token is not one of them.
        is_alternative_NA = branch_estimates.chances_NA > 0
        ranks_NA = np.cumsum(is_alternative_NA, axis=1)
        slots_B = slots_S[lines_B]
        return Branches(
            slots_B=slots_B,
            draft_slots_B=self._num_slots + slots_B * self.num_branches + places_B,
            positions_B=begins_S[lines_B] + offsets_B,
            token_ids_B=branch_estimates.alternative_ids_NA[index_B, columns_B],
            ranks_B=ranks_NA[index_B, columns_B],
            chances_B=flat[lines_B, chosen_B],
        )

    def open(self, branches: Branches, lengths_B: np.ndarray) -> None:
        """Record the branches, each with the number of tokens drafted after its first one."""
        if not len(branches.slots_B):
            return
        places = branches.slots_B, (branches.draft_slots_B - self._num_slots) % self.num_branches
        self._positions[places] = branches.positions_B
        self._token_ids[places] = branches.token_ids_B
        self._ranks[places] = branches.ranks_B
        self._lengths[places] = lengths_B

    def find(self, slots_S: np.ndarray, positions_S: np.ndarray, token_ids_S: np.ndarray) -> FoundBranches:
        """The branches that begin at these positions with these tokens, at most one per slot."""
        is_it = self._positions[slots_S] == positions_S[:, None]
        is_it &= self._token_ids[slots_S] == token_ids_S[:, None]
        lines, places = np.nonzero(is_it)
        slots = slots_S[lines]
        draft_slots = self._num_slots + slots * self.num_branches + places
        return FoundBranches(lines, draft_slots, self._lengths[slots, places])

    def ranks(self, slots_S: np.ndarray, draft_slots_S: np.ndarray) -> np.ndarray:
        """The rank of the alternative that each of these branches began with."""
        return self._ranks[slots_S, (draft_slots_S - self._num_slots) % self.num_branches]

    def sizes(self, slots_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[S], [S]: each slot's open branches, and the tokens drafted in them."""
        is_open = self._positions[slots_S] != UNUSED
        return is_open.sum(axis=1), (self._lengths[slots_S] * is_open).sum(axis=1)

    def drop(self, slots_S: np.ndarray) -> None:
        """Close every branch of these slots."""
        self._positions[slots_S] = UNUSED
