"""What the length policy remembers of every row: by its slot while it runs, by its stream while it does not.

A preempted row goes back to the beginning of its last block. The target has verified that block by then, but
the draft has not been told: what its slot holds is the history at that beginning. It is put aside as it is,
and the row will draft what it would have drafted.

R rows, S slots, H numbers of a history.
"""

from __future__ import annotations

import numpy as np

from specdist.policies import LengthPolicy, VerifiedBlocks


class Histories:
    """A line of numbers per row."""

    def __init__(self, policy: LengthPolicy, num_slots: int) -> None:
        self._policy = policy
        self._initial_H = np.array(policy.initial_history, np.float64)
        self._lines_SH = np.tile(self._initial_H, (num_slots, 1))
        self._suspended: dict[int, np.ndarray] = {}

    def snapshot(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """What :meth:`restore` takes back."""
        return self._lines_SH.copy(), dict(self._suspended)

    def restore(self, snapshot: tuple[np.ndarray, dict[int, np.ndarray]]) -> None:
        """As if nothing had happened since."""
        self._lines_SH, self._suspended = snapshot

    def of(self, slots_R: np.ndarray) -> np.ndarray:
        """[R, H]: up to each row's last resolved block."""
        return self._lines_SH[slots_R]

    def suspend(self, slots_R: np.ndarray, stream_keys_R: np.ndarray) -> None:
        """These rows have given up their slots; each will be opened again."""
        self._suspended |= zip(stream_keys_R.tolist(), self._lines_SH[slots_R].copy(), strict=True)

    def open(self, slots_R: np.ndarray, stream_keys_R: np.ndarray) -> None:
        """Rows begin, or go on in another slot."""
        for slot, key in zip(slots_R.tolist(), stream_keys_R.tolist(), strict=True):
            self._lines_SH[slot] = self._suspended.pop(key, self._initial_H)

    def observe(self, slots_R: np.ndarray, num_drafted_R: np.ndarray, num_accepted_R: np.ndarray) -> None:
        """The target has verified a block of each row; one without tokens says nothing."""
        judged = np.flatnonzero(num_drafted_R)
        if not len(judged):
            return
        slots = slots_R[judged]
        self._lines_SH[slots] = self._policy.next_histories(
            VerifiedBlocks(
                histories_RH=self._lines_SH[slots],
                num_drafted_R=num_drafted_R[judged],
                num_accepted_R=num_accepted_R[judged],
            )
        )
