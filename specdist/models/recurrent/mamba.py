"""Mamba 2 (Dao and Gu, "Transformers are SSMs", arXiv:2405.21060): a state of every head, that a token decays
and adds to.

    h = exp(dt A) h + dt x B;  y = C h

In chunks, as in the paper's section 6, a token reads the others as attention that decays, and the rest from
the state before them. In Mamba 1 (Gu and Dao, arXiv:2312.00752, algorithm 2) channels are the numbers of one
head, which have time steps of their own, and each number of a channel's state decays at a rate of its own: so
tokens follow one another, as in transformers.

S sequences, L tokens of each, H heads of P numbers (Mamba 1: P channels) in G groups of R, N numbers of a
state beside them, T flat tokens, or places of them, E hidden size, I inner size (H × P), C channels of the
convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdist.models.recurrent.cuts import COLWISE, EQUAL, PACKED, ROWWISE, PlannedCut
from specdist.models.recurrent.kernels import kernels_on
from specdist.models.recurrent.mixers import Mixer, has_parts
from specdist.models.recurrent.runs import Padded, Runs, StateShape, recur
from specdist.models.recurrent.short_convolution import causal_convolution

# The tokens of a prompt's chunk: more tokens are more work for each, and fewer products.
CHUNK_TOKENS = 64
PARTS = (
    "in_proj", "conv1d", "dt_bias", "D", "norm", "out_proj", "head_dim", "ssm_state_size", "time_step_limit"
)  # fmt: skip


Run = Callable[[Tensor, "Mamba2Tokens", Tensor, Tensor], tuple[Tensor, Tensor]]

MAMBA1_PARTS = ("in_proj", "conv1d", "x_proj", "dt_proj", "D", "out_proj", "time_step_rank", "ssm_state_size")
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class Mamba2Tokens(NamedTuple):
    """What tokens do to the state, and read of it: x [S, L, H, P], the time steps, float32 [S, L, H], and B
    and C [S, L, G, N]. One whose time step is 0 changes nothing."""

    x: Tensor
    steps: Tensor
    b: Tensor
    c: Tensor

    def at(self, padded: Padded) -> Mamba2Tokens:
        """The tokens at these places of a line."""
        return Mamba2Tokens(*(each[padded.places_SP] for each in self))

    def chunk(self, begin: int, end: int) -> Mamba2Tokens:
        return Mamba2Tokens(*(part[:, begin:end] for part in self))


def run_mamba2(
    state_SHPN: Tensor, tokens: Mamba2Tokens, rates_H: Tensor, borders_S: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of all tokens, float32 [S, L, H, P], and each segment's state after its first ``borders``
    tokens. ``rates``: negative."""
    num_tokens = tokens.x.shape[1]
    is_before_SL = torch.arange(num_tokens, device=borders_S.device) < borders_S[:, None]
    kept = tokens._replace(steps=tokens.steps * is_before_SL[..., None])
    kept_SHPN, outputs = _after(state_SHPN, kept, rates_H), []
    for begin in range(0, num_tokens, CHUNK_TOKENS):
        end = min(begin + CHUNK_TOKENS, num_tokens)
        chunk = tokens.chunk(begin, end)
        outputs.append(_outputs(state_SHPN, chunk, rates_H))
        if end < num_tokens:
            state_SHPN = _after(state_SHPN, chunk, rates_H)
    return torch.cat(outputs, dim=1), kept_SHPN


def _after(state_SHPN: Tensor, tokens: Mamba2Tokens, rates_H: Tensor) -> Tensor:
    """The states after these tokens."""
    logs_SLH = tokens.steps * rates_H
    # The sums are of what is after a token, and not differences of others: those lose digits.
    after_SLH = F.pad(logs_SLH[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
    weighted_SLHP = tokens.x.float() * (tokens.steps * after_SLH.exp())[..., None]
    weighted = weighted_SLHP.unflatten(2, (tokens.b.shape[2], -1))
    added = torch.einsum("slgrp,slgn->sgrpn", weighted, tokens.b.float())
    return state_SHPN * logs_SLH.sum(1).exp()[..., None, None] + added.flatten(1, 2)


def _outputs(state_SHPN: Tensor, tokens: Mamba2Tokens, rates_H: Tensor) -> Tensor:
    """The outputs of a chunk that comes after the states."""
    num_tokens, num_groups = tokens.b.shape[1:3]
    b_SLGN, c_SLGN, of_groups = tokens.b.float(), tokens.c.float(), (num_groups, -1)
    logs_SHL = (tokens.steps * rates_H).transpose(1, 2)
    # Decays from a token (the second) to a later one: [S, H, L, L].
    between = logs_SHL[..., None].expand(*logs_SHL.shape, num_tokens).tril(-1).cumsum(-2)
    is_later_LL = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=between.device).tril()
    weights = between.masked_fill(~is_later_LL, -torch.inf).exp() * tokens.steps.transpose(1, 2)[:, :, None]
    scores_SGLL = torch.einsum("slgn,smgn->sglm", c_SLGN, b_SLGN)
    weights = weights.unflatten(1, of_groups) * scores_SGLL[:, :, None]
    x_SGRLP = tokens.x.float().unflatten(2, of_groups).permute(0, 2, 3, 1, 4)
    of_state = torch.einsum("slgn,sgrpn->sgrlp", c_SLGN, state_SHPN.unflatten(1, of_groups))
    decayed = of_state * logs_SHL.cumsum(-1).exp().unflatten(1, of_groups)[..., None]
    return (weights @ x_SGRLP + decayed).flatten(1, 2).transpose(1, 2)


def outputs_of(tokens: Mamba2Tokens, held: Tensor, runs: Sequence[Runs], rates: Tensor, run: Run) -> Tensor:
    """float32 [T, H, P] of a line of tokens; ``run``: by plain operations, of those of some sequences."""
    kernels, output = kernels_on(held.device), torch.zeros(tokens.x.shape, device=held.device)

    def plain(state_SHPN: Tensor, padded: Padded) -> tuple[Tensor, Tensor]:
        return run(state_SHPN, tokens.at(padded), rates, padded.borders_S)

    kernel = kernels and (lambda numbers_5S: kernels.mamba(output, held, numbers_5S, *tokens, rates))
    return recur(output, held, runs, kernel, plain)


class Mamba2(Mixer):
    """The mixer of Mamba 2, Nemotron-H, Granite 4, Falcon-H1, Bamba and Zamba 2. A row has what goes into the
    convolution, x, B and C, and the time steps."""

    @staticmethod
    def of(module: nn.Module) -> Mamba2 | None:
        """If it has the parts."""
        return Mamba2(module) if has_parts(module, PARTS) else None

    @property
    def _inner(self) -> int:
        return int(self.module.A_log.numel() * self.module.head_dim)

    @property
    def shape(self) -> StateShape:
        module, num_heads = self.module, self.module.A_log.numel()
        channels, _, width = module.conv1d.weight.shape
        return StateShape(
            channels + num_heads, width - 1, (num_heads, module.head_dim, module.ssm_state_size)
        )

    @property
    def num_pieces(self) -> int:
        """B and C are of a group of heads: of one group they are whole, and so is what multiplies each number
        by another one (Falcon-H1)."""
        channels = len(self.module.conv1d.weight)
        num_groups = (channels - self._inner) // (2 * self.module.ssm_state_size)
        return 0 if num_groups == 1 or hasattr(self.module, "mup_vector") else num_groups

    @property
    def cuts(self) -> dict[str, PlannedCut]:
        if not self.num_pieces:
            return {}
        inner, heads = self._inner, self.module.A_log.numel()
        of_group = (len(self.module.conv1d.weight) - inner) // 2
        return {
            "in_proj": PlannedCut(PACKED, (inner, inner, of_group, of_group, heads)),
            "conv1d": PlannedCut(EQUAL, (inner, of_group, of_group)),
            **dict.fromkeys(("A_log", "D", "dt_bias", "norm"), PlannedCut(EQUAL)),
            "out_proj": PlannedCut(ROWWISE),
        }

    def project(self, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, R] and gates [T, I]."""
        module = self.module
        if (multiplier := getattr(module, "ssm_in_multiplier", None)) is not None:
            hidden_TE = hidden_TE * multiplier
        projected = module.in_proj(hidden_TE)
        if (multipliers := getattr(module, "mup_vector", None)) is not None:
            projected = projected * multipliers[0, 0]
        gates_TI, rows_TR = projected.tensor_split([self._inner], dim=-1)
        return rows_TR, gates_TI

    def scan(self, rows_LR: Tensor, held: Tensor, runs: Sequence[Runs]) -> Tensor:
        module, weight_CW = self.module, self.module.conv1d.weight[:, 0]
        inputs_LC, steps_LH = rows_LR.tensor_split([len(weight_CW)], dim=-1)
        convolved = causal_convolution(inputs_LC, weight_CW, module.conv1d.bias, module.activation)
        x, b, c = convolved.tensor_split([self._inner, (self._inner + len(weight_CW)) // 2], dim=-1)
        steps_TH = F.softplus(steps_LH[-len(x) :].float() + module.dt_bias.float())
        b_TGN, c_TGN = (each.unflatten(-1, (-1, module.ssm_state_size)) for each in (b, c))
        tokens = Mamba2Tokens(
            x.unflatten(-1, (-1, module.head_dim)), steps_TH.clamp(*module.time_step_limit), b_TGN, c_TGN
        )
        rates_H = -module.A_log.float().exp()
        output = outputs_of(tokens, held, runs, rates_H, run_mamba2)
        return (output + tokens.x * module.D.float()[:, None]).flatten(1)

    def output(self, mixed_TO: Tensor, rest: Tensor) -> Tensor:
        module = self.module
        if isinstance(module.norm, nn.Identity):
            mixed_TO = mixed_TO * F.silu(rest)
        else:
            mixed_TO = module.norm(mixed_TO[None], rest[None])[0]
        output: Tensor = module.out_proj(mixed_TO.to(rest.dtype))
        return output


def run_mamba1(
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


class Mamba1(Mixer):
    """The mixer of Mamba, Falcon-Mamba and Jamba. A row has what goes into the convolution; B, C and the time
    steps are projected from what comes out."""

    @staticmethod
    def of(module: nn.Module) -> Mamba1 | None:
        """If it has the parts."""
        return Mamba1(module) if has_parts(module, MAMBA1_PARTS) else None

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
        outputs_T1P = outputs_of(tokens, held, runs, rates_PN, run_mamba1)
        return outputs_T1P[:, 0] + x_TP * module.D.float()

    def output(self, mixed_TO: Tensor, rest: Tensor) -> Tensor:
        output: Tensor = self.module.out_proj((mixed_TO * F.silu(rest)).to(rest.dtype))
        return output
