"""The residual of a draft that was certain of its candidate: a distribution Q with all mass on one token.

The rejection rule on such a Q (Leviathan et al. 2023, Algorithm 1, with Q(y) = 1) accepts y with probability
P(y), and norm(max(0, P - Q)) is P without y.

W sequences whose next token is sampled.
"""

from __future__ import annotations

import numpy as np
import torch

from specdist.sampling.distributions import Dense
from specdist.sampling.uploads import upload

# The placeholder of a rejected candidate's id: none was rejected, and the token is drawn from P.
NONE_REJECTED = -1


def without_rejected(target_W: Dense, rejected_ids_W: np.ndarray) -> Dense:
    """P of each sequence without its rejected candidate, normalised.

    Where rounding leaves no mass (P has all on the candidate) P itself: a rejection there has probability
    zero.
    """
    rows = np.flatnonzero(rejected_ids_W != NONE_REJECTED)
    if not len(rows):
        return target_W
    rows_M, ids_M = upload(target_W.device, rows, rejected_ids_W[rows])
    given_MV = target_W.probabilities_NV[rows_M]
    mass_MV = given_MV.scatter(1, ids_M[:, None], 0.0)
    total_M1 = mass_MV.sum(dim=1, keepdim=True)
    left_WV = target_W.probabilities_NV.clone()
    left_WV[rows_M] = torch.where(total_M1 > 0, mass_MV / total_M1, given_MV)
    return Dense(left_WV)
