"""Which kinds of recurrent modules there are, and which of a model's modules are of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from specdist.models.recurrent.gated_delta import gated_delta
from specdist.models.recurrent.mamba1 import Mamba1
from specdist.models.recurrent.mamba2 import Mamba2
from specdist.models.recurrent.mixers import Mixer
from specdist.models.recurrent.short_convolution import short_convolution

# Each tells the mixer of a module that has its parts.
KINDS: tuple[Callable[[nn.Module], Mixer | None], ...] = (
    gated_delta,
    short_convolution,
    Mamba2.of,
    Mamba1.of,
)


def mixer_of(module: nn.Module) -> Mixer | None:
    """The mixer of a module, by its parts; None of one that keeps no state."""
    return next((found for kind in KINDS if (found := kind(module)) is not None), None)


def mixers_of(model: nn.Module) -> dict[str, Mixer]:
    """A model's mixers, by the names of their modules."""
    found = ((name, mixer_of(module)) for name, module in model.named_modules())
    return {name: mixer for name, mixer in found if mixer is not None}
