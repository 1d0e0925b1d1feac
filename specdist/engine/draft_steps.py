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
        kept = lines(keep_A, self.drawn_A.device)
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


def lines(keep_A: np.ndarray, device: torch.device) -> Tensor:
    """The indices of a mask, on the device."""
    return upload(device, np.flatnonzero(keep_A))[0]


def fetch(steps: list[Step]) -> DrawnTokens:
    """All tokens of consecutive steps, from depth 0 on, by one copy."""
    # Token ids are exact in float64.
    columns = [
        torch.cat([step.drawn_A for step in steps]).double(),
        torch.cat([step.probabilities_A for step in steps]),
    ]
    features = [step.features_3A for step in steps if step.features_3A is not None]
    if features:
        columns.extend(torch.cat(features, dim=1).double())
    ids_T, probabilities_T, *features_3T = torch.stack(columns).cpu().numpy()
    return DrawnTokens(
        index_T=np.concatenate([step.active_A for step in steps]),
        depths_T=np.repeat(np.arange(len(steps)), [len(step.active_A) for step in steps]),
        token_ids_T=ids_T.astype(np.int64),
        probabilities_T=probabilities_T,
        features_3T=np.stack(features_3T) if features_3T else None,
    )
