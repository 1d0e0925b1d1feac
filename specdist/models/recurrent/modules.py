"""Modules of transformers that are recognised by their parts."""

from __future__ import annotations

from typing import Any

from torch import nn


class OfModule:
    """A :class:`specdist.models.recurrent.mixers.Mixer` that runs what a module has."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def layer(self) -> int:
        return int(self.module.layer_idx)


def has_parts(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(getattr(module, name, None) is not None for name in names)
