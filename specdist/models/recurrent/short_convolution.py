"""Modules with a gated short convolution and no other state: of LFM2 (arXiv:2511.23404).

A row has a token's input of the convolution. T flat tokens, L places with rows, R channels, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from specdist.models.recurrent.convolution import causal_convolution
from specdist.models.recurrent.cuts import EQUAL, PACKED, ROWWISE, PlannedCut
from specdist.models.recurrent.modules import OfModule, has_parts
from specdist.models.recurrent.runs import Runs, StateShape


class ShortConvolution(OfModule):
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
