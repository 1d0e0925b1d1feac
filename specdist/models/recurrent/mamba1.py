"""Mamba 1 (Gu and Dao, arXiv:2312.00752, algorithm 2): a state of every channel, each of whose numbers decays
at a rate of its own.

As in :mod:`specdist.models.recurrent.mamba2`, with channels as the numbers of one head, which have time steps
of their own. The rates of a state's numbers differ, so tokens follow one another, as in transformers.

S sequences, L tokens of each, P channels, N numbers of a channel's state, T flat tokens, or places of them, E
hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdist.models.recurrent.cuts import COLWISE, EQUAL, PACKED, ROWWISE, PlannedCut
from specdist.models.recurrent.mamba2 import Mamba2Tokens, outputs_of
from specdist.models.recurrent.mixers import OfModule, has_parts
from specdist.models.recurrent.runs import Runs, StateShape
from specdist.models.recurrent.short_convolution import causal_convolution

PARTS = ("in_proj", "conv1d", "x_proj", "dt_proj", "D", "out_proj", "time_step_rank", "ssm_state_size")
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def run(
    state_S1PN: Tensor, tokens: Mamba2Tokens, rates_PN: Tensor, borders_S: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of all tokens, float32 [S, L, 1, P], and each segment's state after its first ``borders``
    tokens. Of the tokens the time steps are [S, L, P]. ``rates``: negative."""
    outputs, kept_S1PN = [], state_S1PN
    parts = zip(*(part.float().unbind(1) for part in tokens), strict=True)
    for token, (x_S1P, steps_SP, b_S1N, c_S1N) in enumerate(parts):
        decays_S1PN = (steps_SP[:, None, :, None] * rates_PN).exp()
        added_S1PN = (steps_SP[:, None] * x_S1P)[..., None] * b_S1N[:, :, None]
        state_S1PN = state_S1PN * decays_S1PN + added_S1PN
        outputs.append((state_S1PN @ c_S1N[..., None])[..., 0])
        kept_S1PN = torch.where((borders_S > token)[:, None, None, None], state_S1PN, kept_S1PN)
    return torch.stack(outputs, dim=1), kept_S1PN


class Mamba1(OfModule):
    """The mixer of Mamba, Falcon-Mamba and Jamba. A row has what goes into the convolution; B, C and the time
    steps are projected from what comes out."""

    @staticmethod
    def of(module: nn.Module) -> Mamba1 | None:
        """If it has the parts."""
        return Mamba1(module) if has_parts(module, PARTS) else None

    @property
    def shape(self) -> StateShape:
        channels, _, width = self.module.conv1d.weight.shape
        return StateShape(channels, width - 1, (1, channels, self.module.ssm_state_size))

    @property
    def num_pieces(self) -> int:
        return len(self.module.conv1d.weight)

    @property
    def cuts(self) -> dict[str, PlannedCut]:
        channels = len(self.module.conv1d.weight)
        return {
            "in_proj": PlannedCut(PACKED, (channels, channels)),
            **dict.fromkeys(("conv1d", "A_log", "D"), PlannedCut(EQUAL)),
            "x_proj": PlannedCut(ROWWISE),
            "dt_proj": PlannedCut(COLWISE),
            "out_proj": PlannedCut(ROWWISE),
        }

    def project(self, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and gates, [T, P] both."""
        rows_TP, gates_TP = self.module.in_proj(hidden_TE).chunk(2, dim=-1)
        return rows_TP, gates_TP

    def scan(self, rows_LP: Tensor, held: Tensor, runs: Sequence[Runs]) -> Tensor:
        module = self.module
        convolution = module.conv1d
        x_TP = causal_convolution(rows_LP, convolution.weight[:, 0], convolution.bias, module.activation)
        widths = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        parts = module.x_proj(x_TP).split(widths, dim=-1)
        if has_parts(module, NORMS):
            parts = [getattr(module, name)(part) for name, part in zip(NORMS, parts, strict=True)]
        steps, b_TN, c_TN = parts
        steps_TP = F.softplus(module.dt_proj(steps).float())
        tokens = Mamba2Tokens(x_TP[:, None], steps_TP, b_TN[:, None], c_TN[:, None])
        rates_PN = -module.A_log.float().exp()
        outputs_T1P = outputs_of(tokens, held, runs, rates_PN, run)
        return outputs_T1P[:, 0] + x_TP * module.D.float()

    def output(self, mixed_TO: Tensor, rest: Tensor) -> Tensor:
        output: Tensor = self.module.out_proj((mixed_TO * F.silu(rest)).to(rest.dtype))
        return output
