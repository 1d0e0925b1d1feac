"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), and modules with it: of Qwen3-Next, Qwen3.5,
OLMo-Hybrid and Kimi-Linear.

A head's state is a matrix from keys to values. A token first lets it decay, then puts its value in the place
of what the state has for its key, to the degree of its rate:

    S' = exp(g) S;  S = S' + k (b (v - k S'));  o = q S

Within a chunk the corrections of all tokens are the solution of a triangular system, and the state after any
of its tokens is the first state, decayed, and the sum of corrections so far, each decayed since.

Modules differ in how projections are joined, and in whether a head has one decay or one for each of its keys'
numbers. A row has a token's queries, keys and values before their convolution, its decays and its rates.

T flat tokens, L places with rows, N places that are run, H heads of values, G of keys, K width of keys and V
of values, D decays of a head: one, or one for each of its keys' numbers (Kimi Team 2025, arXiv:2510.26692),
R numbers of a row, E hidden size, S segments, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdist.models.recurrent.cuts import COLWISE, EQUAL, PACKED, ROWWISE, PlannedCut
from specdist.models.recurrent.kernels import kernels_on
from specdist.models.recurrent.mixers import Mixer, has_parts
from specdist.models.recurrent.runs import Padded, Runs, StateShape, recur
from specdist.models.recurrent.short_convolution import causal_convolution

# Decays of single numbers are compared token by token: a chunk takes memory with the square of its length.
CHUNK_TOKENS, FINE_CHUNK_TOKENS = 64, 16
NORM_EPSILON = 1e-6

OF_ALL = ("conv1d", "layer_idx", "activation", "conv_kernel_size")
OF_HEADS = ("A_log", "dt_bias", "head_k_dim", "head_v_dim")


class DeltaTokens(NamedTuple):
    """What tokens do to the state, float32: queries and keys [S, H, L, K], values [S, H, L, V], logarithms of
    decays [S, H, L, D] and rates [S, H, L, 1]. One whose logarithm and rate are 0 changes nothing."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    log_decays: Tensor
    rates: Tensor

    @staticmethod
    def of(
        padded: Padded,
        queries_NHK: Tensor,
        keys_NHK: Tensor,
        values_NHV: Tensor,
        log_decays_NHD: Tensor,
        rates_NH: Tensor,
    ) -> DeltaTokens:
        """The tokens at these places of a line."""
        line = (queries_NHK, keys_NHK, values_NHV, log_decays_NHD, rates_NH[..., None])
        return DeltaTokens(*(each[padded.places_SP].transpose(1, 2) for each in line))

    def chunk(self, begin: int, end: int) -> DeltaTokens:
        return DeltaTokens(*(part[:, :, begin:end] for part in self))


def normalized(vectors: Tensor) -> Tensor:
    """Vectors of length 1, as far as they are not tiny."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + NORM_EPSILON)


def gated_delta_rule(
    tokens: DeltaTokens, state_SHKV: Tensor, borders: np.ndarray, borders_S: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [S, H, L, V] of all tokens, and each segment's state after its first ``borders`` tokens, which
    are on the host and on the device."""
    outputs: list[Tensor] = []
    kept = running = state_SHKV
    for begin, end in _chunks(tokens.keys.shape[2], tokens.log_decays.shape[-1] > 1):
        chunk = _Chunk(tokens.chunk(begin, end), running)
        outputs.append(chunk.outputs())
        if ((begin < borders) & (borders <= end)).any():
            within_S = (borders_S - begin).clamp(0, end - begin)
            is_here_S = (borders_S > begin) & (borders_S <= end)
            kept = torch.where(is_here_S.view(-1, 1, 1, 1), chunk.state_after(within_S), kept)
        if end < tokens.keys.shape[2]:
            running = chunk.state_after(torch.full_like(borders_S, end - begin))
    return torch.cat(outputs, dim=2), kept


def _chunks(num_tokens: int, is_fine: bool) -> Iterator[tuple[int, int]]:
    size = FINE_CHUNK_TOKENS if is_fine else CHUNK_TOKENS
    for begin in range(0, num_tokens, size):
        yield begin, min(begin + size, num_tokens)


class _Chunk:
    """A chunk's tokens, and what they add to the state before them."""

    def __init__(self, tokens: DeltaTokens, state_SHKV: Tensor) -> None:
        self._tokens, self._state = tokens, state_SHKV
        # Sums from the chunk's beginning through each token.
        self._sums = tokens.log_decays.cumsum(2)
        is_later_CC = torch.ones(2 * (tokens.keys.shape[2],), dtype=torch.bool, device=state_SHKV.device)
        self._is_later_CC = is_later_CC.triu(1)
        self._decayed = self._sums.exp()
        keys = tokens.rates * tokens.keys
        system = self._products(keys).tril(-1)
        known = torch.cat((tokens.rates * tokens.values, keys * self._decayed), dim=-1)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        values, seen = solved.split((tokens.values.shape[-1], keys.shape[-1]), dim=-1)
        self._corrections = values - seen @ state_SHKV

    def _products(self, vectors: Tensor) -> Tensor:
        """[S, H, C, C]: of each token's vector with the key of each at or before it, decayed in between."""
        keys, sums = self._tokens.keys, self._sums
        between = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(
            self._is_later_CC[..., None], -torch.inf
        )
        between.exp_()
        if between.shape[-1] == 1:
            return (vectors @ keys.transpose(2, 3)) * between[..., 0]
        return torch.einsum("shik,shjk,shijk->shij", vectors, keys, between)

    def outputs(self) -> Tensor:
        queries = self._tokens.queries
        return (queries * self._decayed) @ self._state + self._products(queries) @ self._corrections

    def state_after(self, num_tokens_S: Tensor) -> Tensor:
        """The states after so many of the chunk's tokens, which may be none."""
        is_first_SC = torch.arange(self._sums.shape[2], device=num_tokens_S.device) < num_tokens_S[:, None]
        is_first = is_first_SC[:, None, :, None]
        all_S = self._tokens.log_decays.masked_fill(~is_first, 0.0).sum(2, keepdim=True)
        left = (all_S - self._sums).masked_fill(~is_first, -torch.inf).exp()
        return (
            all_S.exp().transpose(2, 3) * self._state
            + (self._tokens.keys * left).transpose(2, 3) @ self._corrections
        )


class GatedDelta(Mixer):
    """Subclasses say where the parts of a row are."""

    norm, projection = "norm", "out_proj"
    doubles_rates = False
    # Parts that are cut by heads of their outputs, besides what all have.
    by_heads: tuple[str, ...] = ()
    of_decays = ("A_log", "dt_bias")

    @property
    def _widths(self) -> tuple[int, int]:
        return self.module.head_k_dim, self.module.head_v_dim

    @property
    def _decays(self) -> tuple[Tensor, Tensor]:
        """The module's logarithms of its heads' own decays, and what is added to the tokens' ones."""
        return self.module.A_log, self.module.dt_bias

    @property
    def _heads(self) -> tuple[int, int]:
        """Heads of values and of keys."""
        num_values = self._decays[0].numel()
        key_width, value_width = self._widths
        left = len(self.module.conv1d.weight) - num_values * value_width
        return num_values, left // (2 * key_width)

    @property
    def shape(self) -> StateShape:
        num_values, _ = self._heads
        channels, _, width = self.module.conv1d.weight.shape
        numbers = channels + self._decays[1].numel() + num_values
        return StateShape(numbers, width - 1, (num_values, *self._widths))

    @property
    def _channels(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        (num_values, num_keys), (key_width, value_width) = self._heads, self._widths
        return num_keys * key_width, num_keys * key_width, num_values * value_width

    @property
    def cuts(self) -> dict[str, PlannedCut]:
        return {
            **dict.fromkeys(self.by_heads, PlannedCut(COLWISE)),
            **dict.fromkeys(self.of_decays, PlannedCut(EQUAL)),
            "conv1d": PlannedCut(EQUAL, self._channels),
            self.projection: PlannedCut(ROWWISE),
        }

    @property
    def num_pieces(self) -> int:
        return self._heads[1]

    def _parts(self, hidden_TE: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Queries, keys, values, decays and rates, each [T, numbers]; and the gate, whose last dimension is
        V."""
        raise NotImplementedError

    def project(self, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
        parts, gate = self._parts(hidden_TE)
        return torch.cat(parts, dim=-1), gate

    def scan(self, rows_LR: Tensor, held: Tensor, runs: Sequence[Runs]) -> Tensor:
        module, (num_values, _), (key_width, value_width) = self.module, self._heads, self._widths
        own_decays, bias = self._decays
        weight = module.conv1d.weight[:, 0]
        mixed, decays, rates = rows_LR.split((len(weight), bias.numel(), num_values), dim=-1)
        mixed = causal_convolution(mixed, weight, module.conv1d.bias, module.activation)
        num_places = len(mixed)
        queries, keys, values = mixed.split(self._channels, dim=-1)
        rates_NH = rates[-num_places:].sigmoid().float() * (2.0 if self.doubles_rates else 1.0)
        decays = F.softplus(decays[-num_places:].float() + bias.float()).unflatten(-1, (num_values, -1))
        logs_NHD = -own_decays.float().exp().view(-1, 1) * decays

        def of_heads(flat: Tensor, width: int) -> Tensor:
            of_each = flat.unflatten(-1, (-1, width)).float()
            # Each head of keys serves as many consecutive ones of values.
            if of_each.shape[1] != num_values:
                of_each = of_each.repeat_interleave(num_values // of_each.shape[1], dim=1)
            return of_each

        queries_NHK = normalized(of_heads(queries, key_width)) * key_width**-0.5
        keys_NHK, values_NHV = normalized(of_heads(keys, key_width)), of_heads(values, value_width)
        tokens = (queries_NHK, keys_NHK, values_NHV, logs_NHD, rates_NH)
        kernels, output = kernels_on(rows_LR.device), torch.zeros_like(values_NHV)

        def plain(state_SHKV: Tensor, padded: Padded) -> tuple[Tensor, Tensor]:
            found, after = gated_delta_rule(
                DeltaTokens.of(padded, *tokens), state_SHKV, padded.borders, padded.borders_S
            )
            return found.transpose(1, 2), after

        kernel = kernels and (lambda numbers_5S: kernels.delta_rule(output, held, numbers_5S, *tokens))
        return recur(output, held, runs, kernel, plain).to(rows_LR.dtype).flatten(1)

    def output(self, mixed_TO: Tensor, rest: Tensor) -> Tensor:
        width = rest.shape[-1]
        norm, projection = getattr(self.module, self.norm), getattr(self.module, self.projection)
        normed = norm(mixed_TO.view(-1, width), rest.reshape(-1, width))
        found: Tensor = projection(normed.view(len(mixed_TO), -1))
        return found


class JoinedGatedDelta(GatedDelta):
    """The mixer of Qwen3-Next: the projections of a head of keys stand together."""

    by_heads = ("in_proj_qkvz", "in_proj_ba")

    def _parts(self, hidden_TE: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        (num_values, num_keys), (key_width, value_width) = self._heads, self._widths
        of_key = num_values // num_keys
        joined = self.module.in_proj_qkvz(hidden_TE).unflatten(-1, (num_keys, -1))
        wide = of_key * value_width
        queries, keys, values, gate = joined.split((key_width, key_width, wide, wide), dim=-1)
        rates, decays = self.module.in_proj_ba(hidden_TE).unflatten(-1, (num_keys, -1)).split(of_key, dim=-1)
        parts = tuple(part.flatten(1) for part in (queries, keys, values, decays, rates))
        return parts, gate.reshape(len(hidden_TE), num_values, value_width)


class SplitGatedDelta(GatedDelta):
    """The mixer of Qwen3.5: queries, keys and values are joined, as they are convolved."""

    by_heads = ("in_proj_z", "in_proj_a", "in_proj_b")

    @property
    def cuts(self) -> dict[str, PlannedCut]:
        return {**super().cuts, "in_proj_qkv": PlannedCut(PACKED, self._channels)}

    def _parts(self, hidden_TE: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        module = self.module
        parts = (module.in_proj_qkv(hidden_TE), module.in_proj_a(hidden_TE), module.in_proj_b(hidden_TE))
        return parts, module.in_proj_z(hidden_TE).unflatten(-1, (-1, self._widths[1]))


class SeparateGatedDelta(GatedDelta):
    """The mixer of OLMo-Hybrid: every projection is one by itself, and rates may be up to 2."""

    norm, projection = "o_norm", "o_proj"
    by_heads = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")

    @property
    def doubles_rates(self) -> bool:  # type: ignore[override]
        return bool(self.module.allow_neg_eigval)

    def _parts(self, hidden_TE: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        module = self.module
        projections = (module.q_proj, module.k_proj, module.v_proj, module.a_proj, module.b_proj)
        parts = tuple(projection(hidden_TE) for projection in projections)
        return parts, module.g_proj(hidden_TE).unflatten(-1, (-1, self._widths[1]))


class KimiDelta(GatedDelta):
    """The mixer of Kimi-Linear: a decay for each number of a key, all heads of one width."""

    norm, projection = "o_norm", "o_proj"
    by_heads = ("q_proj", "k_proj", "v_proj", "b_proj", "g_b_proj", "forget_gate.f_b_proj")
    of_decays = ("forget_gate.A_log", "forget_gate.dt_bias")

    @property
    def _widths(self) -> tuple[int, int]:
        return self.module.head_dim, self.module.head_dim

    @property
    def _decays(self) -> tuple[Tensor, Tensor]:
        gate = self.module.forget_gate
        return gate.A_log, gate.dt_bias

    def _parts(self, hidden_TE: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        module, gate = self.module, self.module.forget_gate
        decays = gate.f_b_proj(gate.f_a_proj(hidden_TE))
        projections = (module.q_proj, module.k_proj, module.v_proj)
        parts = (*(projection(hidden_TE) for projection in projections), decays, module.b_proj(hidden_TE))
        return parts, module.g_b_proj(module.g_a_proj(hidden_TE)).unflatten(-1, (-1, self._widths[1]))


# Kinds by the parts that a module has besides those of all.
PARTS: tuple[tuple[type[GatedDelta], tuple[str, ...]], ...] = (
    (JoinedGatedDelta, (*OF_HEADS, "in_proj_qkvz", "in_proj_ba", "norm", "out_proj")),
    (SplitGatedDelta, (*OF_HEADS, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "norm", "out_proj")),
    (
        SeparateGatedDelta,
        (*OF_HEADS, "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "o_proj"),
    ),
    (
        KimiDelta,
        ("head_dim", "q_proj", "k_proj", "v_proj", "forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm"),
    ),
)


def gated_delta(module: nn.Module) -> GatedDelta | None:
    """The mixer of a module that has the parts of one of these."""
    if has_parts(module, OF_ALL) and isinstance(module.conv1d, nn.Module):
        for kind, names in PARTS:
            if has_parts(module, names):
                return kind(module)
    return None
