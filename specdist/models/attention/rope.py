"""Ropes whose frequencies depend on a text's length (longrope: Ding et al. 2024, arXiv:2402.13753), by row.

transformers chooses the frequencies of a pass by the largest position in it, as if a pass were one text. In a
pass of many rows each token has those of its own row: the long ones beyond the border, and all along a row
whose prompt goes beyond it. That is what ``generate`` has for the row alone: what is in its cache keeps the
frequencies that it was written with, but for families that compute a row anew once it crosses the border.

T flat tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.attention.attention import is_running
from specdist.models.batch.flat import IS_LONG

# Their prepare_inputs_for_generation drops the cache when a text becomes longer than the border.
RECOMPUTING = {"phi3", "phi4_multimodal", "phimoe"}


def rope_border(config: Any) -> int | None:
    """The longest text that a model's rope has its short frequencies for; None if it has only one kind.

    Raises ValueError for several borders in one model.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    borders = {
        int(found.get("original_max_position_embeddings") or text.original_max_position_embeddings)
        for found in each
        if found.get("rope_type") == "longrope"
    }
    if len(borders) > 1:
        raise ValueError(f"ropes with several borders: {sorted(borders)}")
    return borders.pop() if borders else None


def rope_borders(*configs: Any) -> tuple[int, ...]:
    """The borders of several models, in order."""
    return tuple(sorted({border for border in map(rope_border, configs) if border is not None}))


def recomputed_from(config: Any) -> int | None:
    """The border beyond which ``generate`` computes a text anew; None if it never does."""
    return rope_border(config) if config.get_text_config().model_type in RECOMPUTING else None


def ropes_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model's rotary embeddings, by the name that transformers gives their classes."""
    return (module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding"))


def use_frequencies_by_row(model: PreTrainedModel) -> int | None:
    """Let the model's ropes take each token's own frequencies in passes over pages; its border, if it has
    one."""
    border = rope_border(model.config)
    if border is not None:
        for module in ropes_of(model):
            if "forward" not in vars(module):
                module.forward = RowRotary(module, border)
    return border


class RowRotary:
    """Stands in the place of a rotary embedding's forward."""

    def __init__(self, module: nn.Module, border: int) -> None:
        self._module = module
        self._border = border

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """cos and sin [1, T, D] of positions [1, T], to which ``IS_LONG`` may be added."""
        own: Callable[..., tuple[Tensor, Tensor]] = type(self._module).forward
        if not is_running():
            return own(self._module, x, position_ids, *args, **kwargs)
        is_marked = position_ids >= IS_LONG
        positions = torch.where(is_marked, position_ids - IS_LONG, position_ids)
        is_long = is_marked | (positions >= self._border)
        # transformers' own numbers of both kinds: its largest position decides.
        short = own(self._module, x, positions.clamp(max=self._border - 1), *args, **kwargs)
        beyond = torch.full_like(positions[:, :1], self._border)
        long = own(self._module, x, torch.cat([positions, beyond], dim=1), *args, **kwargs)
        cosines, sines = (
            torch.where(is_long[..., None], of_long[:, :-1], of_short)
            for of_long, of_short in zip(long, short, strict=True)
        )
        return cosines, sines
