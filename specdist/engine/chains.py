"""The draft's distributions of the tokens that it has drafted and that nobody has judged yet.

S slots, W rows that are looked up, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from specdist.sampling.distributions import Dense, Distributions


class DraftedLaws:
    """One entry per drafting step: which slots drew a token at which position, and from what.

    A token is judged at the latest in the round after the one in which it was sent, so what is older than
    that is dropped by :meth:`age`.
    """

    def __init__(self) -> None:
        self._older: list[tuple[np.ndarray, np.ndarray, Distributions]] = []
        self._newer: list[tuple[np.ndarray, np.ndarray, Distributions]] = []

    def append(self, slots_S: np.ndarray, positions_S: np.ndarray, laws_S: Distributions) -> None:
        self._newer.append((slots_S, positions_S, laws_S))

    def age(self) -> None:
        """A round is settled: what it judged is not needed again."""
        self._older, self._newer = self._newer, []

    def at(self, slots_W: np.ndarray, positions_W: np.ndarray, like: Dense) -> Dense:
        """Each row's distribution at a position; zeros where it drafted no token there.

        A position may have been drafted twice, behind different tokens: the newest counts.
        """
        rows_WV = torch.zeros_like(like.probabilities_NV)
        for slots_S, positions_S, laws_S in self._older + self._newer:
            assert isinstance(laws_S, Dense)
            place = {slot: index for index, slot in enumerate(slots_S.tolist())}
            pairs = [
                (row, place[slot])
                for row, (slot, position) in enumerate(
                    zip(slots_W.tolist(), positions_W.tolist(), strict=True)
                )
                if slot in place and positions_S[place[slot]] == position
            ]
            if pairs:
                rows, sources = torch.tensor(pairs, device=rows_WV.device).T
                rows_WV[rows] = laws_S.probabilities_NV[sources]
        return Dense(rows_WV)
