"""Branches become candidates: what was drafted for the case that has come about.

The reply needs only their tokens. Their keys and values follow while the target runs its pass, and so does
the closing of all other branches.

R sequences that decode, B branches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from specdist.engine.draft.ahead.branches import BranchTable
from specdist.engine.draft.ahead.first_ahead import FirstAhead
from specdist.engine.draft.steps.draft_state import NOWHERE, DraftState
from specdist.engine.times.reports import AheadReport
from specdist.models.passes.runner import ModelRunner
from specdist.policies.payoff import RoundChooser
from specdist.utils.ranges import places_from


class BranchAdoption:
    """Of one draft's branches."""

    def __init__(
        self,
        runner: ModelRunner,
        draft_state: DraftState,
        branches: BranchTable,
        chooser: RoundChooser | None,
    ) -> None:
        """``chooser``: learns how many misses are caught."""
        self._runner = runner
        self._draft_state = draft_state
        self._branches = branches
        self._chooser = chooser
        self._put_off: list[Callable[[], None]] = []

    def adopt(self, slots_R: np.ndarray, first: FirstAhead, num_branches: int) -> AheadReport:
        """Let the branches that begin with this round's next tokens become the candidates, and close all
        others; what the reply does not need is left to :meth:`finish`. Returns the outcome of all work ahead.

        ``num_branches``: of a sequence, in the round that has drafted them.
        """
        state, branches = self._draft_state, self._branches
        ranks_R = np.zeros(len(slots_R), np.int64)
        if not branches.num_branches:
            return AheadReport(
                num_tokens_R=first.num_ahead_R, is_hit_R=first.is_hit_R, num_branches_R=ranks_R,
                num_branch_tokens_R=ranks_R, branch_ranks_R=ranks_R,
            )  # fmt: skip
        num_branches_R, num_branch_tokens_R = branches.sizes(slots_R)
        positions_R = state.num_committed[slots_R] - 1
        # After a hit no branch is needed.
        wanted_R = np.where(first.is_hit_R, NOWHERE, state.token_ids[slots_R, positions_R])
        found = branches.find(slots_R, positions_R, wanted_R)
        draft_slots_B, lengths_B = found.draft_slots_B, found.lengths_B
        if len(draft_slots_B):
            slots_B, positions_B = slots_R[found.index_B], positions_R[found.index_B]
            ranks_R[found.index_B] = branches.ranks(slots_B, draft_slots_B)
            num_branch_tokens_R[found.index_B] -= lengths_B
            sources = places_from(draft_slots_B, positions_B + 1, lengths_B)
            targets = places_from(slots_B, positions_B + 1, lengths_B)
            state.copy_drafted(sources, targets)
            # The cache has the branch's first token, which is the next token, and all others but the last.
            self._put_off.append(
                partial(self._runner.adopt_branches, draft_slots_B, slots_B, positions_B, lengths_B)
            )
            # Forced tokens are in no cache before the next pass.
            computed_B = state.num_computed[draft_slots_B]
            state.num_computed[slots_B] = np.minimum(computed_B, positions_B + lengths_B)
            state.num_candidates[slots_B] = lengths_B

        def close() -> None:
            branches.drop(slots_R)
            if self._chooser is not None:
                num_missed = int((~first.is_hit_R & (num_branches_R > 0)).sum())
                self._chooser.observe_misses(num_branches, num_missed, len(draft_slots_B))

        self._put_off.append(close)
        return AheadReport(
            num_tokens_R=first.num_ahead_R,
            is_hit_R=first.is_hit_R,
            num_branches_R=num_branches_R,
            num_branch_tokens_R=num_branch_tokens_R,
            branch_ranks_R=ranks_R,
        )

    def finish(self) -> None:
        """To be called before the next pass over these sequences."""
        put_off, self._put_off = self._put_off, []
        for each in put_off:
            each()

    def drop(self) -> None:
        """The request has failed: every sequence will be opened again."""
        self._put_off = []
