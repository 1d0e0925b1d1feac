"""A short causal convolution of each channel by itself, over tokens with those before them.

S segments, L tokens of each, C channels, W width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN


def causal_convolution(
    rows_SLC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
) -> Tensor:
    """[S, L - W + 1, C]: of all tokens but the first, which only the others see."""
    rows_SCL = rows_SLC.transpose(1, 2).to(weight_CW.dtype)
    found_SCL = F.conv1d(rows_SCL, weight_CW[:, None], bias_C, groups=len(weight_CW))
    if activation is not None:
        found_SCL = ACT2FN[activation](found_SCL)
    return found_SCL.transpose(1, 2).to(rows_SLC.dtype)
