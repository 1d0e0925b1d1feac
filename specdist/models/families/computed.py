"""The tensors that a model computes when it is built, such as the frequencies of rotary embeddings.

Checkpoints do not store them. Converting the model to another dtype, or moving it to another device without
its contents, damages them: they are saved before and restored after.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from specdist.models.files.checkpoint import Checkpoint, build_model
from specdist.models.quantized.quantized import plain_config


def build_without_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model of texts with parameters on the meta device, and with every buffer as transformers computes
    it.

    Its configuration is a copy: what is set in a model's is not the checkpoint's. With
    ``torch.device("meta")`` buffers made by ``torch.ones`` and the like would lose their values.
    """
    with _parameters_on_meta():
        config = copy.deepcopy(plain_config(checkpoint))
        return build_model(config, trusts_code=checkpoint.trusts_code, dtype=dtype)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        found = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        found._is_hf_initialized = True  # type: ignore[attr-defined]
        return found

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        # Random numbers for every one, which has no values, would take most of the time.
        with guard_torch_init_functions():
            yield
    finally:
        hook.remove()


@dataclass(frozen=True)
class _Place:
    """Where a module holds a tensor: in a buffer, or in a plain attribute."""

    module: str
    name: str
    is_buffer: bool
    is_persistent: bool = True


class ComputedTensors:
    """Every buffer of a model with its dtype and value, and the plain attributes that are one of them.

    Taken from a model as it was built; :meth:`restore` expects modules of the same names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, list[_Place]] = {}
        self._tensors: dict[int, Tensor] = {}
        for module_name, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    place = _Place(module_name, name, True, name not in module._non_persistent_buffers_set)
                    self._places.setdefault(id(buffer), []).append(place)
                    self._tensors[id(buffer)] = buffer
        for module_name, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and id(value) in self._tensors:
                    self._places[id(value)].append(_Place(module_name, name, False))

    def restore(self, model: nn.Module, device: torch.device) -> None:
        """Assign new tensors on the device. Copying into the existing buffers would keep their dtype."""
        for key, tensor in self._tensors.items():
            placed = tensor.to(device)
            for place in self._places[key]:
                module = model.get_submodule(place.module)
                if place.is_buffer:
                    module.register_buffer(place.name, placed, persistent=place.is_persistent)
                else:
                    setattr(module, place.name, placed)
