"""Keys and values in 8 bits: float8_e4m3fn, with a scale of each token and head.

A scale makes the largest number of a head's key or value 448, the largest of the format. So it needs no
calibration, a token's numbers do not depend on other tokens, and what is large in one of them makes none of
the others coarse. Scales are bfloat16, which has the exponents of float32: 2 bytes for the D of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
SCALE_DTYPE = torch.bfloat16


def to_float8(tokens_TGD: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers' bits, uint8 [T, G, D], and their scales [T, G]. What is not finite makes its head so."""
    tokens_TGD = tokens_TGD.float()
    scales_TG = (tokens_TGD.abs().amax(-1) / LARGEST).to(SCALE_DTYPE)
    scales_TG = scales_TG.where(scales_TG != 0, 1.0)
    numbers_TGD = tokens_TGD / scales_TG.float()[..., None]
    return numbers_TGD.to(torch.float8_e4m3fn).view(torch.uint8), scales_TG


def from_float8(bits: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [..., G, D] of bits [..., G, D] with scales [..., G]."""
    return (bits.view(torch.float8_e4m3fn).float() * scales.float()[..., None]).to(dtype)
