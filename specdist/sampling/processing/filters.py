"""Temperature, top-k and top-p in plain operations, for every device.

N distributions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tempered(logits_NV: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, which is positive. Half precision cannot hold the tail of a large
    vocabulary: at least float32."""
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature


def plain_probabilities(logits_NV: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """[N, V] in float32 or wider: temperature, then top-k (0 = all), then top-p (1 = all), then softmax."""
    scores_NV = tempered(logits_NV, temperature)
    if 0 < top_k < scores_NV.shape[1]:
        kth_N1 = scores_NV.topk(top_k, dim=1).values[:, -1:]
        scores_NV = scores_NV.masked_fill(scores_NV < kth_N1, -torch.inf)
    if top_p < 1:
        ascending_NV = scores_NV.sort(dim=1).values
        outside_NV = ascending_NV.softmax(dim=1).cumsum(dim=1) <= 1 - top_p
        outside_NV[:, -1] = False
        # Which of equal scores a sort puts first is not the same on every device: all of them are kept.
        least_N1 = ascending_NV.gather(1, outside_NV.sum(dim=1, keepdim=True))
        scores_NV = scores_NV.masked_fill(scores_NV < least_N1, -torch.inf)
    return scores_NV.softmax(dim=1)
