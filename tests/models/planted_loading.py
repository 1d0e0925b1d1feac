"""A rank of the test of the loading check: sound shards pass it, shards with a planted fault do not."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from specdist.models.families import computed
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_sharded
from specdist.models.start_check.loading_check import check_loading
from specdist.utils.errors import UserError
from tests.models.families import VOCAB_SIZE
from tests.ranks import join, leave

topology = join(tp_size=2)
group = dist.new_group([0, 1])
sound, fp8, *others = sys.argv[1:]


def into_converted_buffers(self: computed.ComputedTensors, model: nn.Module, device: torch.device) -> None:
    """The old fault: as in buffers that were converted to the model's precision."""
    dtype = next(model.parameters()).dtype
    for key, tensor in self._tensors.items():
        for place in self._places[key]:
            buffer = model.get_submodule(place.module)._buffers[place.name]
            buffer.copy_(tensor.to(dtype))  # type: ignore[union-attr]


def turned(name: str) -> Callable[[nn.Module], None]:
    """Another order of the slice's rows, or of the numbers that it adds up."""

    def spoil(model: nn.Module) -> None:
        weight = model.get_parameter(name)
        is_summed = any(word in name for word in ("o_proj", "down_proj"))
        weight.data = weight.data.flip(1 if is_summed else 0)

    return spoil


def ones(name: str) -> Callable[[nn.Module], None]:
    """A norm whose weights were not read."""
    return lambda model: model.get_parameter(name).data.fill_(1)


FAULTS: dict[str, Callable[[nn.Module], object]] = {
    "values turned": turned("model.layers.2.self_attn.v_proj.weight"),
    "attention's output turned": turned("model.layers.0.self_attn.o_proj.weight"),
    "head turned": turned("lm_head.weight"),
    "last norm missing": ones("model.norm.weight"),
}


def failure(
    folder: str, dtype: torch.dtype, spoil: Callable[[nn.Module], object] | None = None
) -> str | None:
    """The result of the check on rank 0, which alone compares."""
    checkpoint = open_checkpoint("--target", folder)
    where = {"device": topology.device, "vocab_size": VOCAB_SIZE, "group": group}
    model = load_sharded(checkpoint, dtype=dtype, **where)
    if spoil is not None:
        spoil(model)
    try:
        check = check_loading(model, checkpoint, dtype=dtype, **where)
    except UserError as error:
        return str(error)
    assert check.is_checked == topology.is_rank0, check.reason
    assert model.config.num_hidden_layers == len(model.get_decoder().layers) == 3, "left cut to fewer layers"
    return None


for dtype in (torch.float32, torch.bfloat16):
    found = failure(sound, dtype)
    assert found is None, found
for name, fault in FAULTS.items():
    found = failure(sound, torch.bfloat16, fault)
    assert (found is not None) == topology.is_rank0, name
    print(name, found)  # noqa: T201 (shown if a rank fails)


def scales_of_the_next(model: nn.Module) -> None:
    """Scales that belong to other rows."""
    layer = model.get_submodule("model.layers.2.mlp.gate_proj")
    layer.scales.copy_(layer.scales.roll(1, 0))  # type: ignore[operator, union-attr]


for folder in (fp8, *others):
    found = failure(folder, torch.bfloat16)
    assert found is None, (folder, found)
found = failure(fp8, torch.bfloat16, scales_of_the_next)
assert (found is not None) == topology.is_rank0, "scales of other rows"
computed.ComputedTensors.restore = into_converted_buffers  # type: ignore[method-assign]
for folder in (sound, *others):
    found = failure(folder, torch.bfloat16)
    assert (found is not None) == topology.is_rank0, (folder, "rotary frequencies in bfloat16")
    assert found is None or "layer 0 queries" in found, found
leave()
