"""What the steps of a draft loop have drawn: on the device until the loop is over, then all on the host.

A slots that a step draws for, T tokens of several steps, one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.sampling.uploads import upload


class Step(NamedTuple):
    """One step's draws, on the device: their indices in the draft batch, the tokens and their probabilities;
    if they are used, their features, and a head's estimates, on the host, of the tokens before them."""

    active_A: np.ndarray
    drawn_A: Tensor
    probabilities_A: Tensor
    features_3A: Tensor | None
    earlier_estimates_A: np.ndarray | None = None

    def select(self, keep_A: np.ndarray) -> Step:
        """Those of a mask."""
        if keep_A.all():
            return self
        kept = indices_of(keep_A, self.drawn_A.device)
        return Step(
            self.active_A[keep_A],
            self.drawn_A[kept],
            self.probabilities_A[kept],
            None if self.features_3A is None else self.features_3A[:, kept],
            None if self.earlier_estimates_A is None else self.earlier_estimates_A[keep_A],
        )


class DrawnTokens(NamedTuple):
    """On the host: index in the draft batch, depth, token id and probability of each token; its features
    [3, T], if they are used."""

    index_T: np.ndarray
    depths_T: np.ndarray
    token_ids_T: np.ndarray
    probabilities_T: np.ndarray
    features_3T: np.ndarray | None

    def select(self, is_kept_R: np.ndarray) -> DrawnTokens:
        """Those of some of the draft batch."""
        kept_T = is_kept_R[self.index_T]
        features_3T = None if self.features_3T is None else self.features_3T[:, kept_T]
        return DrawnTokens(
            self.index_T[kept_T],
            self.depths_T[kept_T],
            self.token_ids_T[kept_T],
            self.probabilities_T[kept_T],
            features_3T,
        )

    def as_step(self) -> Step:
        """The tokens of one step, on the host."""
        features_3T = None if self.features_3T is None else torch.from_numpy(self.features_3T)
        drawn_T, probabilities_T = torch.from_numpy(self.token_ids_T), torch.from_numpy(self.probabilities_T)
        return Step(self.index_T, drawn_T, probabilities_T, features_3T)


def indices_of(keep_A: np.ndarray, device: torch.device) -> Tensor:
    """The indices of a mask, on the device."""
    return upload(device, np.flatnonzero(keep_A))[0]


def fetch(steps: list[Step]) -> DrawnTokens:
    """All tokens of consecutive steps, from depth 0 on, by one copy."""
    return tokens_of(steps, columns_of(steps).cpu().numpy())


def columns_of(steps: list[Step]) -> Tensor:
    """float64 [2 or 5, T], on the device: token ids, which are exact, probabilities, and features if used."""
    columns = [
        torch.cat([step.drawn_A for step in steps]).double(),
        torch.cat([step.probabilities_A for step in steps]),
    ]
    features = [step.features_3A for step in steps if step.features_3A is not None]
    if features:
        columns.extend(torch.cat(features, dim=1).double())
    return torch.stack(columns)


def tokens_of(steps: list[Step], columns: np.ndarray, *, first_depth: int = 0) -> DrawnTokens:
    """The steps' tokens, with their columns on the host."""
    return DrawnTokens(
        index_T=np.concatenate([step.active_A for step in steps]),
        depths_T=first_depth + np.repeat(np.arange(len(steps)), [len(step.active_A) for step in steps]),
        token_ids_T=columns[0].astype(np.int64),
        probabilities_T=columns[1],
        features_3T=columns[2:] if len(columns) > 2 else None,
    )
