"""Puts quantised layers into a model, whole or sharded by DeepSpeed, and fills them from stored parts.

A stored part (numbers, scales, zero points) is read whole, and a rank keeps its piece: with borders of
groups, blocks and packed columns where layers are cut. A layer that is quantised while it is loaded takes its
scales from the whole matrix, so that they do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.files.checkpoint import Checkpoint
from specdist.models.loading.weight_names import WeightNames
from specdist.models.quantized.quantized import Quantization, linear_layers, quantization_of
from specdist.models.quantized.quantized_linear import Cut, QuantizedLinear
from specdist.models.quantized.quantized_weights import LayerFormat, QuantizedWeight, from_stored, quantize
from specdist.models.recurrent.cuts import GRAIN, ROWWISE, PlannedCut
from specdist.models.sharding.tp_plan import SUMMED, WHOLE, planned_cuts
from specdist.utils.errors import UserError
from specdist.utils.ranges import range_of_part

# Kinds of numbers in safetensors' headers.
PLAIN_KINDS = {"F64", "F32", "F16", "BF16"}
# Read along: the shape of a packed weight is that of its layer, and scales of inputs that are not rounded.
UNUSED_PARTS = ("weight_shape", "activation_scale", "input_scale", "input_global_scale")


def part_kinds(form: LayerFormat, part: str) -> set[str]:
    """How a stored part may be stored."""
    if form.numbers == "float4":
        scales = {"U8"} if form.has_powers else {"F8_E4M3"}
        kinds = {form.scale_name: scales, "weight": {"U8"}, "weight_packed": {"U8"}}
    else:
        whole = {"I8"} if form.numbers == "int8" else {"F8_E4M3"}
        kinds = {"weight": whole, "weight_packed": {"I32"}, "weight_zero_point": {"I8", "I32"}}
    return kinds.get(part, PLAIN_KINDS)


class QuantizedParts:
    """Which stored tensors are parts of which quantised layer of a whole model."""

    def __init__(self, model: PreTrainedModel, quantization: Quantization) -> None:
        self._names = WeightNames(model)
        linears = linear_layers(model)
        self.shapes = {name: (layer.out_features, layer.in_features) for name, layer in linears.items()}
        files = getattr(model, "file_names", None)
        stored_as = {name: name if files is None else files.stored(name) for name in linears}
        formats = {
            name: quantization.format_of(stored_as[name], shape[1]) for name, shape in self.shapes.items()
        }
        self.formats = {name: form for name, form in formats.items() if form is not None}
        stored = {name: quantization.stored_format_of(stored_as[name]) for name in linears}
        self.stored_formats = {name: form for name, form in stored.items() if form is not None}

    def expected(self, layer: str) -> dict[str, tuple[int, ...]]:
        """The stored parts of a layer that is quantised in memory or in the files, with their shapes."""
        form = self.stored_formats.get(layer)
        return {"weight": self.shapes[layer]} if form is None else form.stored_shapes(*self.shapes[layer])

    def of(self, stored_names: Iterable[str]) -> dict[str, tuple[str, str]]:
        """(layer, part) of each stored tensor that is one."""
        split = {name: name.rpartition(".")[::2] for name in stored_names}
        takers = self._names.takers({f"{owner}.weight" for owner, _ in split.values()})
        found = {}
        for name, (owner, part) in split.items():
            for weight in takers[f"{owner}.weight"]:
                layer = weight.removesuffix(".weight")
                is_quantized = layer in self.formats or layer in self.stored_formats
                if is_quantized and (part in self.expected(layer) or part in UNUSED_PARTS):
                    found[name] = (layer, part)
        return found

    def weight(self, layer: str, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """The whole weight of a layer that is quantised in memory."""
        form, stored = self.formats[layer], self.stored_formats.get(layer)
        if stored is None:
            return quantize(form, parts["weight"])
        weight = from_stored(stored, parts, self.shapes[layer])
        return weight if form is stored else quantize(form, weight.dequantized(torch.float32))


def check_parts(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, str],
    tp_size: int,
    *,
    has_experts: bool,
) -> set[str]:
    """Raises :class:`UserError` for parts of quantised layers that are missing, or of another shape or kind,
    and for layers that cannot be cut into ``tp_size`` parts between their groups, blocks or packed columns.

    Args:
        model: whole, on the meta device.
        has_experts: others than linear layers are quantised.

    Returns:
        The stored tensors that are such parts.
    """
    quantization = quantization_of(checkpoint)
    if quantization is None:
        return set()
    what = f"{checkpoint.option} {checkpoint.name}"
    parts = QuantizedParts(model, quantization)
    if not parts.formats and not has_experts:
        is_asked = checkpoint.quantization is not None
        remedy = (
            f"leave {checkpoint.quantizing_option} out" if is_asked else "fetch an unquantised checkpoint"
        )
        raise UserError(
            f"{what}: none of its layers can be quantised ({type(model).__name__} has no plain linear layers "
            f"but its head): {remedy}"
        )
    found = parts.of(shapes)
    stored = {place: name for name, place in found.items()}
    for layer in parts.stored_formats:
        for part, shape in parts.expected(layer).items():
            name = stored.get((layer, part))
            form = parts.stored_formats[layer]
            if name is None:
                raise part_missing(what, f"{layer}.{part}", form)
            # A single scale has one dimension or none; one per channel may lack the second.
            given = shapes[name]
            if given != shape and _trimmed(given) != _trimmed(shape):
                raise part_of_other_shape(what, name, given, shape, form)
            if kinds[name] not in part_kinds(form, part):
                raise part_of_other_kind(what, name, kinds[name], form)
    if tp_size > 1:
        cuts = planned_cuts(model)
        for layer, form in parts.formats.items():
            if not cuts or (layer in cuts and cuts[layer].style not in WHOLE):
                _check_borders(checkpoint, layer, form, parts.shapes[layer], tp_size, cuts.get(layer))
    return set(found)


def part_missing(what: str, part: str, form: LayerFormat | str) -> UserError:
    """Of what is quantised by ``form``."""
    return UserError(
        f"{what}: its files hold no {part}, which its quantisation ({form}) needs: fetch it again"
    )


def part_of_other_shape(
    what: str, stored: str, given: Sequence[int], wanted: Sequence[int], form: LayerFormat | str
) -> UserError:
    return UserError(
        f"{what}: {stored} is of shape {list(given)} in the files, but its quantisation ({form}) asks for "
        f"{list(wanted)}: fetch both again"
    )


def part_of_other_kind(what: str, stored: str, kind: str, form: LayerFormat | str) -> UserError:
    return UserError(
        f"{what}: {stored} is stored as {kind}, which its quantisation ({form}) does not mean: fetch it again"
    )


def place_layers(model: nn.Module, parts: QuantizedParts) -> dict[str, QuantizedLinear]:
    """Quantised layers in place of plain ones, or of those that DeepSpeed has cut; on the meta device.

    Raises :class:`UserError` for a layer that DeepSpeed cuts in a way of its own.
    """
    placed = {}
    for name, form in parts.formats.items():
        plain = model.get_submodule(name)
        bias: Any = plain.bias
        layer = QuantizedLinear(form, *parts.shapes[name], bias=bias, cut=_cut_of(name, plain))
        model.set_submodule(name, layer)
        placed[name] = layer
    return placed


def _cut_of(name: str, plain: nn.Module) -> Cut | None:
    if type(plain) is nn.Linear:
        return None
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    from specdist.models.sharding.tp_layers import ColumnLinear

    index: Any = plain.tp_index
    group: Any = plain.mp_group
    assert isinstance(group, dist.ProcessGroup)
    if isinstance(plain, ColumnLinear):
        return Cut(0, plain.ranges, group)
    if type(plain) not in (LinearAllreduce, LinearLayer):
        raise UserError(
            f"{name} is quantised, and DeepSpeed cuts it as {type(plain).__name__}, which this package does "
            "not do for quantised layers: use --tp_size 1"
        )
    sizes: Any = plain._partition_sizes
    own = (range_of_part(sizes, index),)
    return Cut(1, own, group, tuple(sizes)) if type(plain) is LinearAllreduce else Cut(0, own, group)


def _check_borders(
    checkpoint: Checkpoint,
    name: str,
    form: LayerFormat,
    shape: tuple[int, int],
    tp_size: int,
    planned: PlannedCut | None,
) -> None:
    from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list

    from specdist.models.sharding.tp_layers import own_ranges

    is_summed = name.endswith(SUMMED) if planned is None else planned.style == ROWWISE
    dim = 1 if is_summed else 0
    border = form.border(dim)
    if planned is None:
        meta = AutoTPMeta.from_model_config(checkpoint.config.get_text_config(), GRAIN)
        sizes = get_shard_size_list(shape[dim], tp_size, meta, ".".join(name.split(".")[-2:]))
    else:
        parts = [own_ranges(planned, shape[dim], rank, tp_size) for rank in range(tp_size)]
        sizes = [len(own) for ranges in parts for own in ranges]
    uneven = [size for size in sizes[:-1] if size % border]
    if uneven:
        raise UserError(
            f"--tp_size {tp_size} cuts {name} of {checkpoint.option} {checkpoint.name} into parts of "
            f"{uneven[0]} {'columns' if dim else 'rows'}, but {border} share a scale ({form}) and cannot be "
            "cut: use a lower --tp_size"
        )


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without trailing dimensions of 1."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
