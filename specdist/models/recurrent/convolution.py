"""A short causal convolution of each channel by itself, over tokens with those before them.

L places of tokens, C channels, W width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from specdist.models.recurrent.libraries import can_convolve, convolution_on


def causal_convolution(
    rows_LC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
) -> Tensor:
    """[L - W + 1, C]: of all places but the first, which only the others see."""
    library = convolution_on(rows_LC.device, rows_LC.dtype)
    if library is not None and can_convolve(rows_LC, weight_CW, activation):
        found_1CL = library(rows_LC.T[None], weight_CW, bias_C, activation=activation)
        return found_1CL[0].T[weight_CW.shape[1] - 1 :]
    rows_CL = rows_LC.T.to(weight_CW.dtype)
    found_CL = F.conv1d(rows_CL[None], weight_CW[:, None], bias_C, groups=len(weight_CW))[0]
    if activation is not None:
        found_CL = ACT2FN[activation](found_CL)
    return found_CL.T.to(rows_LC.dtype)
