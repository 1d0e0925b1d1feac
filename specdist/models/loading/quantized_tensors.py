"""The quantised tensors of a checkpoint: which stored tensors are the parts of each, and which linear layers
are quantised in memory.

A stored part (numbers, scales, zero points) is read whole, and a rank keeps its piece: with borders of
groups, blocks and packed columns where layers are cut. A layer that is quantised while it is loaded takes its
scales from the whole matrix, so that they do not depend on the number of ranks. Experts lie in files one by
one, in the layouts of linear layers, or joined (MXFP4: numbers of four bits, of which 32 share a power of
two). Their inputs are not rounded.

E experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.weight_files import PLAIN_KINDS
from specdist.models.loading.conversions import Piece, Shape
from specdist.models.loading.weight_names import WeightNames
from specdist.models.quantized.quantized import MXFP4_FORMAT, Quantization, linear_layers
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.quantized.quantized_weights import LayerFormat, QuantizedWeight, from_stored
from specdist.models.recurrent.cuts import GRAIN, ROWWISE, Cut, PlannedCut, cut_of
from specdist.models.sharding.tp_plan import SUMMED, WHOLE, planned_cuts
from specdist.utils.errors import UserError

# Read along: the shape of a packed weight is that of its layer, scales of inputs that are not rounded, and of
# keys and values: a cache in 8 bits has scales of its own.
UNUSED_PARTS = (
    "weight_shape", "activation_scale", "input_scale", "input_global_scale", "k_scale", "v_scale"
)  # fmt: skip
MXFP4_PARTS, MXFP4_KIND = ("blocks", "scales"), "U8"
NUMBERS_PER_BYTE = 2


class QuantizedTensors:
    """The quantised tensors of a whole model's checkpoint. A linear layer's has the name of its parameter,
    and those of experts the name that a plain one would have in the files.

    Attributes:
        parts: by stored tensor the quantised tensor that it belongs to, and which part of it it is.
        formats: how each quantised tensor is stored.
        shapes: of all stored tensors, with those of quantised experts in the place of their parts, and
            without the parts of linear layers.
        layers: the linear layers that are quantised in memory, with their formats.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        names: WeightNames,
        quantization: Quantization | None,
        shapes: Mapping[str, Shape],
    ) -> None:
        self.parts: dict[str, tuple[str, str]] = {}
        self.formats: dict[str, LayerFormat] = {}
        self.shapes, self._stored = dict(shapes), shapes
        self.layers: dict[str, LayerFormat] = {}
        # The shapes of the weights of all linear layers.
        self._linear: dict[str, tuple[int, int]] = {}
        if quantization is None:
            return
        files = getattr(model, "file_names", None)
        for layer, linear in linear_layers(model).items():
            self._linear[f"{layer}.weight"] = (linear.out_features, linear.in_features)
            stored_as = layer if files is None else files.stored(layer)
            form = quantization.format_of(stored_as, linear.in_features)
            stored_form = quantization.stored_format_of(stored_as)
            self.layers |= {} if form is None else {layer: form}
            self.formats |= {} if stored_form is None else {f"{layer}.weight": stored_form}
        for stored in shapes:
            name, part, form = self._part(names, quantization, stored)
            if form is not None:
                self.parts[stored], self.formats[name] = (name, part), form
                del self.shapes[stored]
        self.shapes |= {name: self._shape(name) for name in self.formats if name not in self._linear}

    def _part(
        self, names: WeightNames, quantization: Quantization, stored: str
    ) -> tuple[str, str, LayerFormat | None]:
        """The quantised tensor that a stored one is a part of, the part, and the format; without a format it
        is not one."""
        if quantization.has_mxfp4_experts:
            name, _, part = stored.rpartition("_")
            is_part = part in MXFP4_PARTS and names.renamed(name)[0] in names.known
            return name, part, MXFP4_FORMAT if is_part else None
        owner, _, part = stored.rpartition(".")
        name, pattern = names.renamed(f"{owner}.weight")
        form = self.formats.get(name) if name in self._linear else None
        if pattern is not None:  # joined with others, as single experts are
            name, form = f"{owner}.weight", quantization.stored_format_of(owner)
        is_part = form is not None and part in {*form.stored_shapes(1, 1), *UNUSED_PARTS}
        return name, part, form if is_part else None

    def _shape(self, name: str) -> Shape:
        """The shape of a tensor of experts, as far as its parts tell."""
        form = self.formats[name]
        if form == MXFP4_FORMAT:
            *first, num_groups, num_bytes = self._stored.get(f"{name}_blocks", (0, 0, 0, 0))
            return (*first[:-1], num_groups * num_bytes * NUMBERS_PER_BYTE, first[-1])
        num_outputs, width = self._stored.get(f"{name}_packed" if form.is_packed else name, (0, 0))
        return num_outputs, width * form.num_stored_together

    def expected(self, name: str) -> Mapping[str, Shape]:
        """The stored parts that make a quantised tensor, with their shapes."""
        form = self.formats[name]
        if form == MXFP4_FORMAT:
            blocks = self._stored.get(f"{name}_blocks", (0, 0, 0, 0))
            return {"blocks": blocks, "scales": blocks[:-1]}
        num_outputs, num_inputs = self._linear.get(name) or self.shapes[name]
        return form.stored_shapes(num_outputs, num_inputs)

    def pieces(self, name: str) -> list[Piece]:
        """The matrices of a quantised tensor with their places in it, by the names of :meth:`matrices`."""
        shape = self._linear.get(name) or self.shapes[name]
        if self.formats[name] != MXFP4_FORMAT:
            return [Piece.whole(name, shape)]
        turned = (("transpose", (0, 1)), ("unsqueeze", (0,)))
        return [
            Piece(f"{name} {expert}", (expert, 0, 0), (1, *shape[1:]), turned) for expert in range(shape[0])
        ]

    def matrices(self, name: str, parts: Mapping[str, Tensor]) -> dict[str, QuantizedWeight]:
        """The matrix of a quantised tensor by its own name; those of joined experts [E, K, N], each stored as
        [N, K], by names of theirs."""
        form = self.formats[name]
        if form != MXFP4_FORMAT:
            num_outputs, num_inputs = self._linear.get(name) or self.shapes[name]
            return {name: from_stored(form, parts, (num_outputs, num_inputs))}
        num_inputs = self.shapes[name][1]
        stored = zip(parts["blocks"], parts["scales"], strict=True)
        return {
            f"{name} {expert}": QuantizedWeight(form, num_inputs, blocks_NGB.flatten(1), scales_NG)
            for expert, (blocks_NGB, scales_NG) in enumerate(stored)
        }

    def numbers(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """A quantised tensor, dequantised to float32."""
        found = self.matrices(name, parts)
        if name in found:
            return found[name].dequantized(torch.float32)
        return torch.stack([weight.dequantized(torch.float32).T for weight in found.values()])

    def check(self, checkpoint: Checkpoint, kinds: Mapping[str, str]) -> None:
        """Raises :class:`UserError` for parts that are missing, or of another shape or kind of number
        (``kinds``, by stored tensor)."""
        what = f"{checkpoint.option} {checkpoint.name}"
        found = {place: stored for stored, place in self.parts.items()}
        for name, form in self.formats.items():
            for part, shape in self.expected(name).items():
                stored = found.get((name, part))
                if stored is None:
                    layer = name.removesuffix(".weight")
                    lacking = f"{layer}.{part}" if name in self._linear else f"{part} of {name}"
                    raise UserError(
                        f"{what}: its files hold no {lacking}, which its quantisation ({form}) needs: fetch "
                        "it again"
                    )
                # A single scale has one dimension or none; one per channel may lack the second.
                given = self._stored[stored]
                if given != shape and _trimmed(given) != _trimmed(shape):
                    raise UserError(
                        f"{what}: {stored} is of shape {list(given)} in the files, but its quantisation "
                        f"({form}) asks for {list(shape)}: fetch both again"
                    )
                if kinds[stored] not in part_kinds(form, part):
                    raise UserError(
                        f"{what}: {stored} is stored as {kinds[stored]}, which its quantisation ({form}) "
                        "does not mean: fetch it again"
                    )

    def check_borders(self, checkpoint: Checkpoint, model: PreTrainedModel, tp_size: int) -> None:
        """Raises :class:`UserError` for linear layers of the whole ``model`` that cannot be cut into
        ``tp_size`` parts between their groups, blocks or packed columns."""
        cuts = planned_cuts(model) if tp_size > 1 else {}
        for layer, form in self.layers.items() if tp_size > 1 else ():
            if not cuts or (layer in cuts and cuts[layer].style not in WHOLE):
                shape = self._linear[f"{layer}.weight"]
                _check_borders(checkpoint, layer, form, shape, tp_size, cuts.get(layer))

    def place_layers(self, model: nn.Module) -> None:
        """Put quantised layers in the place of plain ones, or of those that DeepSpeed has cut; on the meta
        device. Raises :class:`UserError` for a layer that DeepSpeed cuts in a way of its own."""
        for name, form in self.layers.items():
            plain: Any = model.get_submodule(name)
            cut, group = _cut_of(name, plain)
            shape = self._linear[f"{name}.weight"]
            model.set_submodule(name, QuantizedLinear(form, *shape, bias=plain.bias, cut=cut, group=group))


def part_kinds(form: LayerFormat, part: str) -> set[str]:
    """How a stored part may be stored."""
    if form == MXFP4_FORMAT:
        return {MXFP4_KIND}
    if form.numbers == "float4":
        scales = {"U8"} if form.has_powers else {"F8_E4M3"}
        kinds = {form.scale_name: scales, "weight": {"U8"}, "weight_packed": {"U8"}}
    else:
        whole = {"I8"} if form.numbers == "int8" else {"F8_E4M3"}
        kinds = {"weight": whole, "weight_packed": {"I32"}, "weight_zero_point": {"I8", "I32"}}
    return kinds.get(part, PLAIN_KINDS)


def _cut_of(name: str, plain: Any) -> tuple[Cut | None, dist.ProcessGroup | None]:
    """The cut of a layer's weight, and the ranks that share it."""
    if type(plain) is nn.Linear:
        return None, None
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    from specdist.models.sharding.tp_layers import ColumnLinear

    if type(plain) not in (LinearAllreduce, LinearLayer, ColumnLinear):
        raise UserError(
            f"{name} is quantised, and DeepSpeed cuts it as {type(plain).__name__}, which this package does "
            "not do for quantised layers: use --tp_size 1"
        )
    cut = cut_of(plain, "weight")
    assert cut is not None
    if cut.dim == 1:
        cut = replace(cut, sizes=tuple(plain._partition_sizes))
    return cut, plain.mp_group


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
    """A shape without trailing dimensions of 1."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
