"""Which kinds of recurrent modules there are, and how a model's modules become them.

T flat tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from specdist.models.attention.attention import is_running, running_attention
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
# The attribute of a module that has one.
MIXER = "mixer_of_states"


def mixer_of(module: nn.Module) -> Mixer | None:
    """By its parts."""
    return next((found for kind in KINDS if (found := kind(module)) is not None), None)


def mixers_of(model: nn.Module) -> dict[str, Mixer]:
    """By the names of their modules."""
    found = ((name, mixer_of(module)) for name, module in model.named_modules())
    return {name: mixer for name, mixer in found if mixer is not None}


def use_mixers(model: nn.Module) -> None:
    """Let recurrent modules run over states in passes, and as they are outside of them."""
    for module in model.modules():
        if MIXER not in vars(module) and (mixer := mixer_of(module)) is not None:
            setattr(module, MIXER, mixer)
            module.forward = partial(_forward, mixer, module)


def _forward(mixer: Mixer, module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """[1, T, E] to the same, as a module's own forward; of a pass there are no masks, and no cache."""
    if not is_running():
        return type(module).forward(module, hidden_states, *args, **kwargs)
    rows_TR, rest = mixer.project(hidden_states[0])
    mixing: Any = running_attention()
    return mixer.output(mixing.mix(mixer, rows_TR), rest)[None]
