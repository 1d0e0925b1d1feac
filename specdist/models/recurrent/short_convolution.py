"""Short causal convolutions of each channel by itself, and modules with a gated one and no other state: of
LFM2 (arXiv:2511.23404).

A row has a token's input of the convolution. T flat tokens, L places with rows, C or R channels, W width of
a convolution, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from specdist.models.recurrent.cuts import EQUAL, PACKED, ROWWISE, PlannedCut
from specdist.models.recurrent.mixers import Mixer, has_parts
from specdist.models.recurrent.runs import Runs, StateShape


def causal_convolution(
    rows_LC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
) -> Tensor:
    """[L - W + 1, C]: of all places but the first, which only the others see."""
    rows_CL = rows_LC.T.to(weight_CW.dtype)
    found_CL = F.conv1d(rows_CL[None], weight_CW[:, None], bias_C, groups=len(weight_CW))[0]
    if activation is not None:
        found_CL = ACT2FN[activation](found_CL)
    return found_CL.T.to(rows_LC.dtype)


class ShortConvolution(Mixer):
    """LFM2's mixer."""

    @property
    def shape(self) -> StateShape:
        channels, _, width = self.module.conv.weight.shape
        return StateShape(channels, width - 1)

    @property
    def cuts(self) -> dict[str, PlannedCut]:
        width = self.module.in_proj.out_features // 3
        joined = PlannedCut(PACKED, (width, width, width))
        return {"in_proj": joined, "conv": PlannedCut(EQUAL), "out_proj": PlannedCut(ROWWISE)}

    @property
    def num_pieces(self) -> int:
        return len(self.module.conv.weight)

    def project(self, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
        before, after, inputs = self.module.in_proj(hidden_TE).chunk(3, dim=-1)
        return before * inputs, after

    def scan(self, rows_LR: Tensor, held: Tensor, runs: Sequence[Runs]) -> Tensor:
        conv = self.module.conv
        return causal_convolution(rows_LR, conv.weight[:, 0], conv.bias, None)

    def output(self, mixed_TO: Tensor, rest: Tensor) -> Tensor:
        found: Tensor = self.module.out_proj(rest * mixed_TO)
        return found


def short_convolution(module: nn.Module) -> ShortConvolution | None:
    """The mixer of a module with these parts."""
    names = ("conv", "in_proj", "out_proj", "conv_kernel_size", "layer_idx")
    is_one = has_parts(module, names) and getattr(module, "A_log", None) is None
    return ShortConvolution(module) if is_one and isinstance(module.conv, nn.Conv1d) else None
