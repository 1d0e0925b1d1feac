"""What the draft learns of verified blocks: how long to draft, and what a round should do.

It changes what is drafted next, not what is ready. So a draft that has worked ahead replies first, and learns
while the target runs its pass; one that drafts before its reply learns before it drafts.

R sequences that decode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdist.engine.draft_ahead import AheadDrafter
from specdist.engine.draft_state import DraftState, OwnTokens
from specdist.engine.first_ahead import FirstAhead
from specdist.engine.histories import Histories
from specdist.engine.memory_beside import NoMemory
from specdist.policies import BatchPolicy, LengthPolicy


class _Verified(NamedTuple):
    slots_R: np.ndarray
    begins_R: np.ndarray
    positions_R: np.ndarray
    own: OwnTokens
    first: FirstAhead
    is_rejected_R: np.ndarray


class Lessons:
    """Keeps what the last rounds have shown until there is time to learn from it."""

    def __init__(
        self, draft_state: DraftState, histories: Histories, ahead: AheadDrafter, policy: LengthPolicy,
        memory: NoMemory,
    ) -> None:  # fmt: skip
        self._draft_state, self._histories, self._ahead = draft_state, histories, ahead
        self._memory = memory
        self._batch_policy = policy if isinstance(policy, BatchPolicy) else None
        # More than one where target groups have had their replies one after the other.
        self._verified: list[_Verified] = []

    def keep(
        self, slots_R: np.ndarray, num_accepted_R: np.ndarray, first: FirstAhead, is_rejected_R: np.ndarray
    ) -> None:
        """Of the last blocks, before they are forgotten; ``is_rejected_R``: of their drafted tokens, the
        first that was not accepted is known."""
        state = self._draft_state
        begins_R, own = state.num_committed[slots_R], state.own_tokens(slots_R, num_accepted_R)
        self._verified.append(
            _Verified(slots_R, begins_R, begins_R + num_accepted_R, own, first, is_rejected_R)
        )

    def drop(self) -> None:
        """The request has failed: every sequence will be opened again."""
        self._verified = []

    def learn(self) -> None:
        """Once; to be called before anything is drafted."""
        verified, self._verified = self._verified, []
        for blocks in verified:
            self._learn(blocks)
        self._memory.learn()

    def _learn(self, verified: _Verified) -> None:
        slots_R, begins_R, positions_R, own, first, is_rejected_R = verified
        features, is_hit_R = self._draft_state.features, first.is_hit_R
        self._histories.observe(slots_R, own.num_free_R, own.num_free_accepted_R)
        self._ahead.observe(
            own.num_accepted_R + is_hit_R, is_rejected_R & (own.are_next_R | first.is_verified_R)
        )
        if self._batch_policy is not None:
            num_kept_R = own.num_accepted_R + (own.are_next_R & is_hit_R)
            num_verified_R = num_kept_R + (own.are_next_R & is_rejected_R)
            self._batch_policy.observe_tokens(
                features.verified(slots_R, begins_R, num_verified_R, num_kept_R)
            )
        # A next token stands in the place of the drafted one that was rejected.
        features.forget((slots_R[~is_hit_R], positions_R[~is_hit_R]))
