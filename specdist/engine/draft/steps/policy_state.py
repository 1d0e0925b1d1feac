"""The length policy's state of every sequence, and what the target's verdicts teach the policy.

The state is kept by slot while a sequence runs, by random stream while it is preempted. A preempted sequence
goes back to the beginning of its last block. The target has verified that block by then, but the draft has
not received the result: its slot still holds the state at the beginning of the block. That state is put aside
as it is, so the sequence will draft the same block again.

What is learned changes what is drafted next, not what is ready. So a draft that has worked ahead replies
first, and learns while the target runs its pass; one that drafts before its reply learns before it drafts.

R sequences, S slots, H numbers of a state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specdist.engine.draft.steps.draft_state import DraftState
from specdist.policies import LengthPolicy, VerifiedBlocks


class PolicyState:
    """H numbers per sequence."""

    def __init__(self, policy: LengthPolicy, num_slots: int) -> None:
        self._policy = policy
        self._initial_H = np.array(policy.initial_history, np.float64)
        self._lines_SH = np.tile(self._initial_H, (num_slots, 1))
        # The states of suspended sequences, by random stream.
        self._suspended: dict[int, np.ndarray] = {}

    def of(self, slots_R: np.ndarray) -> np.ndarray:
        """[R, H]: up to each sequence's last resolved block."""
        return self._lines_SH[slots_R]

    def suspend(self, slots_R: np.ndarray, stream_keys_R: np.ndarray) -> None:
        """These sequences were preempted; each will be opened again."""
        self._suspended |= zip(stream_keys_R.tolist(), self._lines_SH[slots_R].copy(), strict=True)

    def open(self, slots_R: np.ndarray, stream_keys_R: np.ndarray) -> None:
        """Sequences begin, or go on in another slot."""
        for slot, stream_key in zip(slots_R.tolist(), stream_keys_R.tolist(), strict=True):
            self._lines_SH[slot] = self._suspended.pop(stream_key, self._initial_H)

    def observe(self, slots_R: np.ndarray, num_drafted_R: np.ndarray, num_accepted_R: np.ndarray) -> None:
        """The target has verified a block of each sequence; a block without candidates changes nothing."""
        verified = np.flatnonzero(num_drafted_R) if len(self._initial_H) else ()
        if not len(verified):
            return
        slots = slots_R[verified]
        self._lines_SH[slots] = self._policy.next_histories(
            VerifiedBlocks(
                histories_RH=self._lines_SH[slots],
                num_drafted_R=num_drafted_R[verified],
                num_accepted_R=num_accepted_R[verified],
            )
        )


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
        self._waiting: Callable[[], None] = lambda: None

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
        # Without those that were forced: the candidates, those accepted, and these with the next token that
        # was drafted.
        num_free_R = state.num_free(slots_R, state.num_candidates[slots_R])
        num_free_accepted_R = state.num_free(slots_R, num_accepted_R)
        num_kept_R = num_accepted_R + is_hit_R
        num_free_kept_R = state.num_free(slots_R, num_kept_R)
        begins_R = state.num_committed[slots_R]

        def learn() -> None:
            self._policy_state.observe(slots_R, num_free_R, num_free_accepted_R)
            self._observe(num_free_kept_R, is_rejected_R)
            if self._batch_policy is not None:
                num_verified_R = num_kept_R + is_rejected_R
                self._batch_policy.observe_tokens(
                    state.features.verified(slots_R, begins_R, num_verified_R, num_kept_R)
                )
            # A next token stands in the place of the drafted one that was rejected.
            positions_R = begins_R + num_accepted_R
            state.features.forget((slots_R[~is_hit_R], positions_R[~is_hit_R]))

        self._waiting = learn

    def learn(self) -> None:
        """Once; to be called before anything is drafted."""
        waiting, self._waiting = self._waiting, lambda: None
        waiting()
