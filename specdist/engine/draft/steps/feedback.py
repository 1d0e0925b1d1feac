"""What the target's verdicts teach the length policy.

It changes what is drafted next, not what is ready. So a draft that has worked ahead replies first, and
learns while the target runs its pass; one that drafts before its reply learns before it drafts.

R sequences that decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.draft.steps.policy_state import PolicyState
from specdist.policies import LengthPolicy


class _Verified(NamedTuple):
    """The last blocks: where they begin and how many candidates were accepted; of the candidates, of those
    accepted, and of these with the next token that was drafted, how many were not forced."""

    slots_R: np.ndarray
    begins_R: np.ndarray
    num_accepted_R: np.ndarray
    num_free_R: np.ndarray
    num_free_accepted_R: np.ndarray
    num_free_kept_R: np.ndarray
    is_hit_R: np.ndarray
    is_rejected_R: np.ndarray


class Feedback:
    """Keeps what the last round has shown until there is time to learn from it."""

    def __init__(
        self,
        draft_state: DraftState,
        policy_state: PolicyState,
        policy: LengthPolicy,
        observe: Callable[[np.ndarray, np.ndarray], None],
    ) -> None:
        """``observe``: is told how many verified tokens of each sequence were accepted, and whether one was
        rejected."""
        self._draft_state, self._policy_state, self._observe = draft_state, policy_state, observe
        self._batch_policy = policy if policy.is_for_batch else None
        self._verified: _Verified | None = None

    def keep(
        self,
        slots_R: np.ndarray,
        num_accepted_R: np.ndarray,
        is_hit_R: np.ndarray,
        is_rejected_R: np.ndarray,
    ) -> None:
        """Keep what was accepted of the last blocks, before they are forgotten; ``is_rejected_R``: of their
        drafted tokens, the first that was not accepted is known."""
        state = self._draft_state
        num_free_R = state.num_free(slots_R, state.num_candidates[slots_R])
        num_free_accepted_R = state.num_free(slots_R, num_accepted_R)
        free_R = num_free_R, num_free_accepted_R, state.num_free(slots_R, num_accepted_R + is_hit_R)
        begins_R = state.num_committed[slots_R]
        self._verified = _Verified(slots_R, begins_R, num_accepted_R, *free_R, is_hit_R, is_rejected_R)

    def drop(self) -> None:
        """The request has failed: every sequence will be opened again."""
        self._verified = None

    def learn(self) -> None:
        """Once; to be called before anything is drafted."""
        verified, self._verified = self._verified, None
        if verified is None:
            return
        slots_R, begins_R, is_hit_R = verified.slots_R, verified.begins_R, verified.is_hit_R
        features, num_kept_R = self._draft_state.features, verified.num_accepted_R + is_hit_R
        self._policy_state.observe(slots_R, verified.num_free_R, verified.num_free_accepted_R)
        self._observe(verified.num_free_kept_R, verified.is_rejected_R)
        if self._batch_policy is not None:
            num_verified_R = num_kept_R + verified.is_rejected_R
            self._batch_policy.observe_tokens(
                features.verified(slots_R, begins_R, num_verified_R, num_kept_R)
            )
        # A next token stands in the place of the drafted one that was rejected.
        positions_R = begins_R + verified.num_accepted_R
        features.forget((slots_R[~is_hit_R], positions_R[~is_hit_R]))
