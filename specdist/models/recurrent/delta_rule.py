"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) in chunks, from a state and up to any token.

A head's state is a matrix from keys to values. A token first lets it decay, then puts its value in the place
of what the state has for its key, to the degree of its rate:

    S' = exp(g) S;  S = S' + k (b (v - k S'));  o = q S

Within a chunk the corrections of all tokens are the solution of a triangular system, and the state after any
of its tokens is the first state, decayed, and the sum of corrections so far, each decayed since.

S segments, L tokens of each, C of a chunk, N places of all, H heads, K width of keys and V of values, D
decays of a head: one, or one for each of its keys' numbers (Kimi Team 2025, arXiv:2510.26692).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.recurrent.runs import Padded

# Decays of single numbers are compared token by token: a chunk takes memory with the square of its length.
CHUNK_TOKENS, FINE_CHUNK_TOKENS = 64, 16
NORM_EPSILON = 1e-6


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
