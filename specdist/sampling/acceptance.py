"""The rejection rule of speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023).

C candidates of all rows, one after the other; R rows; K the longest block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accepted_flags(target_C: Tensor, draft_C: Tensor, uniforms_C: Tensor) -> Tensor:
    """True where a candidate passes u < P(y) / Q(y), strictly, without dividing.

    Args:
        target_C: P(y), the target's probability of each drawn candidate.
        draft_C: Q(y), the probability with which the draft drew it; positive.
        uniforms_C: float64 in [0, 1), one per candidate, for this purpose alone.
    """
    return uniforms_C * draft_C < target_C


def num_accepted(flags_C: Tensor, lengths_R: Tensor) -> Tensor:
    """Per row the number of candidates before its first rejection; ``lengths_R`` sums to C."""
    num_rows, longest = len(lengths_R), int(lengths_R.max()) if len(lengths_R) else 0
    inside_RK = torch.arange(longest) < lengths_R[:, None]
    flags_RK = torch.zeros(num_rows, longest, dtype=torch.bool)
    flags_RK[inside_RK] = flags_C
    return flags_RK.cumprod(dim=1).sum(dim=1)
