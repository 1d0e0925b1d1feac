"""Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): the cache holds what keys and values are
made of.

A layer makes the keys and values of all its heads from a latent of each token, and a rotated part of the key
that its heads share. transformers' layers do so between their cache and their attention, in ``expand_kv``. In
its place here stands what the layer keeps, as one key of one head whose first numbers are the value; the
projections from the latent are part of the queries and of the output (the paper's "absorption"): q · (W c) is
(Wᵀ q) · c, and the weighted sum of W c is W times that of c. The products are the same up to rounding. What
many tokens attend to is expanded after all: :mod:`specdist.models.attention.expanding`.

T flat tokens, L keys, H heads, D width of a head without its rotated part, R width of a latent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdist.models.attention.attention import (
    ABSORPTION,
    AttentionCall,
    AttentionRules,
    LayerAttention,
    is_keeping_latents,
)
from specdist.models.attention.expanding import ExpandedAttention
from specdist.models.attention.expansion import EXPAND, Expansion, can_absorb, expansion_of_layer
from specdist.utils.trial import check_difference, first_right, tolerance_of

NUM_TOKENS = 5

logger = logging.getLogger(__name__)


class Latents:
    """Stands in the place of a layer's ``expand_kv``: in passes that keep latents it expands nothing."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer: Any = layer

    def __call__(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """[1, 1, T, R] and the shared part of the keys, to key and value."""
        if not is_keeping_latents():
            return self.expanded(latent, rotated)
        key = torch.cat((latent, rotated), dim=-1)
        return key, key[..., : latent.shape[-1]]

    def expanded(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head, by transformers."""
        found: tuple[Tensor, Tensor] = getattr(type(self._layer), EXPAND)(self._layer, latent, rotated)
        return found

    @property
    def expansion(self) -> Expansion:
        return expansion_of_layer(self._layer, self._layer.kv_b_proj.weight.element_size())

    def _weights(self) -> tuple[Tensor, Tensor]:
        """The maps from latents to keys and to values, of this rank's heads: [H, D, R] each."""
        layer = self._layer
        widths = [layer.qk_nope_head_dim, layer.v_head_dim]
        weight_HDR = layer.kv_b_proj.weight.view(-1, sum(widths), layer.kv_lora_rank)
        to_keys_HDR, to_values_HDR = weight_HDR.split(widths, dim=1)
        return to_keys_HDR, to_values_HDR

    def attend(self, attention: LayerAttention, layer: int, call: AttentionCall) -> Tensor:
        """The layer's output, of its own queries and latents."""
        if isinstance(attention, ExpandedAttention):
            return attention.attend_latents(layer, call, self)
        return self.output(attention.attend(layer, call._replace(queries_THD=self.queries(call.queries_THD))))

    def queries(self, queries_THD: Tensor) -> Tensor:
        """[T, H, D and the rotated part] to what attends to latents."""
        to_keys_HDR, _ = self._weights()
        plain_THD, rotated = queries_THD.tensor_split([to_keys_HDR.shape[1]], dim=-1)
        absorbed_THR = (plain_THD.transpose(0, 1) @ to_keys_HDR).transpose(0, 1)
        return torch.cat((absorbed_THR, rotated), dim=-1)

    def output(self, output_THR: Tensor) -> Tensor:
        """[T, H, R] to [T, H, width of a value]."""
        _, to_values_HDR = self._weights()
        return (output_THR.transpose(0, 1) @ to_values_HDR.transpose(1, 2)).transpose(0, 1)

    def keys_and_values(self, latents_LR: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of some heads, [L, heads, D and the rotated part] and [L, heads, width of a value],
        of latents and rotated parts. Laid out like pages."""
        to_keys_HDR, to_values_HDR = (each[heads] for each in self._weights())
        latents_LR, rotated = latents_LR.tensor_split([to_keys_HDR.shape[2]], dim=-1)
        plain_LHD, values_LHD = (
            functional.linear(latents_LR, each.flatten(0, 1)).unflatten(1, each.shape[:2])
            for each in (to_keys_HDR, to_values_HDR)
        )
        rotated_LHE = rotated[:, None].expand(-1, plain_LHD.shape[1], -1)
        return torch.cat((plain_LHD, rotated_LHE), dim=-1), values_LHD

    @torch.inference_mode()
    def check(self, generator: torch.Generator) -> None:
        """Raises an error, a ValueError of other numbers, where it does not give those of ``expand_kv``."""
        layer, weight = self._layer, self._layer.kv_b_proj.weight
        (num_heads, width, _), _ = (each.shape for each in self._weights())

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)

        latent = random(1, 1, NUM_TOKENS, layer.kv_lora_rank)
        rotated = random(1, 1, NUM_TOKENS, layer.qk_rope_head_dim)
        query_THD = random(NUM_TOKENS, num_heads, width + layer.qk_rope_head_dim)
        shares_TT = random(NUM_TOKENS, NUM_TOKENS)
        key, value = (each[0] for each in self.expanded(latent, rotated))
        kept = torch.cat((latent, rotated), dim=-1)[0, 0]
        sums_THR = (shares_TT @ latent[0, 0])[:, None].expand(-1, num_heads, -1)
        queries_HTR = self.queries(query_THD).transpose(0, 1)
        own_key, own_value = (each.transpose(0, 1) for each in self.keys_and_values(kept, slice(None)))
        for what, found, expected in (
            ("scores", queries_HTR @ kept.T, query_THD.transpose(0, 1) @ key.transpose(1, 2)),
            ("outputs", self.output(sums_THR), (shares_TT @ value).transpose(0, 1)),
            ("keys", own_key, key),
            ("values", own_value, value),
        ):
            difference = float((found - expected).float().norm() / expected.float().norm())
            check_difference(f"its {what} differ", difference, tolerance_of("attention", weight.dtype))


def use_latents(model: nn.Module) -> None:
    """Let layers of latent attention keep latents in passes over pages that ask for it. Versions of
    transformers without ``expand_kv``, and layers of other parts, keep keys and values."""
    for layer in model.modules():
        if can_absorb(layer):
            latents = Latents(layer)
            setattr(layer, EXPAND, latents)
            setattr(layer, ABSORPTION, latents)


def latents_of(model: nn.Module) -> Iterator[Latents]:
    """The latents of the model's layers that may keep them."""
    return (found for layer in model.modules() if (found := vars(layer).get(ABSORPTION)) is not None)


def can_keep_latents(model: nn.Module) -> bool:
    """Whether layers of latent attention give transformers' numbers with their projections absorbed; which is
    logged. Models without such layers can."""
    found = list(latents_of(model))
    if not found:
        return True

    def check(latents: list[Latents]) -> None:
        generator = torch.Generator().manual_seed(0)
        for each in latents:
            each.check(generator)

    trial = first_right({"kept as latents": lambda: found}, check)
    what = f"keys and values of {len(found)} layers of latent attention"
    trial.report(logger, what, "kept of every head, in many times the memory")
    return trial.found is not None


def expansion_of(model: nn.Module, rules: Mapping[int, AttentionRules]) -> Expansion | None:
    """The expansion of a model whose latents are all as wide and seen without windows; None of others."""
    has_windows = any(each.is_latent and each.window is not None for each in rules.values())
    kept = latents_of(model) if any(each.is_latent for each in rules.values()) and not has_windows else ()
    found = {each.expansion for each in kept}
    return found.pop() if len(found) == 1 else None
