"""The length policy's state of every sequence: by slot while it runs, by random stream while it is preempted.

A preempted sequence goes back to the beginning of its last block. The target has verified that block by then,
but the draft has not received the result: its slot still holds the state at the beginning of the block. That
state is put aside as it is, so the sequence will draft the same block again.

R sequences, S slots, H numbers of a state.
"""

from __future__ import annotations

import numpy as np

from specdist.policies import LengthPolicy, VerifiedBlocks


class PolicyState:
    """H numbers per sequence."""

    def __init__(self, policy: LengthPolicy, num_slots: int) -> None:
        self._policy = policy
        self._initial_H = np.array(policy.initial_history, np.float64)
        self._lines_SH = np.tile(self._initial_H, (num_slots, 1))
        # The states of suspended sequences, by random stream.
        self._suspended: dict[int, np.ndarray] = {}

    def snapshot(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """A copy for :meth:`restore`."""
        return self._lines_SH.copy(), dict(self._suspended)

    def restore(self, snapshot: tuple[np.ndarray, dict[int, np.ndarray]]) -> None:
        """Undo everything since the snapshot was taken."""
        self._lines_SH, self._suspended = snapshot

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
