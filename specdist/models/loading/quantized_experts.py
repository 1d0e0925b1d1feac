"""Experts that are stored quantised: which stored tensors are parts of them, and what they mean.

In files they lie one by one, in the layouts of linear layers, or joined (MXFP4: numbers of four bits, of
which 32 share a power of two). Their inputs are not rounded.

E experts, N outputs, K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from specdist.models.files.checkpoint import Checkpoint
from specdist.models.loading.conversions import Shape
from specdist.models.loading.quantized_loading import (
    UNUSED_PARTS,
    part_kinds,
    part_missing,
    part_of_other_kind,
    part_of_other_shape,
)
from specdist.models.loading.weight_names import WeightNames
from specdist.models.quantized.quantized import MXFP4_FORMAT, Quantization
from specdist.models.quantized.quantized_weights import LayerFormat, QuantizedWeight, from_stored

MXFP4_PARTS, MXFP4_KIND = ("blocks", "scales"), "U8"
NUMBERS_PER_BYTE = 2


class QuantizedExperts:
    """Which stored tensors are parts of which tensor of experts.

    Attributes:
        places: by stored tensor the tensor that is meant, and which part of it it is.
        shapes: of all stored tensors, with those that are meant in the place of their parts.
        formats: by tensor that is meant.
    """

    def __init__(
        self, names: WeightNames, quantization: Quantization | None, shapes: Mapping[str, Shape]
    ) -> None:
        self.places: dict[str, tuple[str, str]] = {}
        self.shapes = dict(shapes)
        self.formats: dict[str, LayerFormat] = {}
        self._stored = shapes
        for stored in shapes if quantization is not None else ():
            assert quantization is not None
            meant, part, form = self._place(names, quantization, stored)
            if part and form is not None:
                self.places[stored] = (meant, part)
                self.formats[meant] = form
        for stored in self.places:
            del self.shapes[stored]
        self.shapes |= {meant: self._shape(meant) for meant in self.formats}

    def is_complete(self, meant: str, parts: Mapping[str, Tensor]) -> bool:
        return set(self._expected(meant)) <= set(parts)

    def weights(
        self, meant: str, parts: Mapping[str, Tensor]
    ) -> Iterator[tuple[int | None, QuantizedWeight]]:
        """Its matrix, or those of one joined expert after the other with its number."""
        form = self.formats[meant]
        if form != MXFP4_FORMAT:
            num_outputs, num_inputs = self.shapes[meant]
            yield None, from_stored(form, parts, (num_outputs, num_inputs))
            return
        num_inputs = self.shapes[meant][1]
        for expert, (blocks_NGB, scales_NG) in enumerate(zip(parts["blocks"], parts["scales"], strict=True)):
            yield expert, QuantizedWeight(form, num_inputs, blocks_NGB.flatten(1), scales_NG)

    def numbers(self, meant: str, parts: Mapping[str, Tensor]) -> Tensor:
        """All of it in float32."""
        found = dict(self.weights(meant, parts))
        if None in found:
            return found[None].dequantized(torch.float32)
        return torch.stack([weight.dequantized(torch.float32).T for weight in found.values()])

    def check(self, checkpoint: Checkpoint, kinds: Mapping[str, str]) -> None:
        """Raises :class:`UserError` for parts that are missing, or of another shape or kind of number."""
        what = f"{checkpoint.option} {checkpoint.name}"
        found = {place: stored for stored, place in self.places.items()}
        for meant, form in self.formats.items():
            for part, shape in self._expected(meant).items():
                stored = found.get((meant, part))
                if stored is None:
                    raise part_missing(what, f"{part} of {meant}", form)
                given = self._stored[stored]
                if math.prod(given) != math.prod(shape) or (len(shape) > 1 and given[0] != shape[0]):
                    raise part_of_other_shape(what, stored, given, shape, form)
                allowed = {MXFP4_KIND} if form == MXFP4_FORMAT else part_kinds(form, part)
                if kinds[stored] not in allowed:
                    raise part_of_other_kind(what, stored, kinds[stored], form)

    def _place(
        self, names: WeightNames, quantization: Quantization, stored: str
    ) -> tuple[str, str, LayerFormat | None]:
        if quantization.has_mxfp4_experts:
            meant, _, part = stored.rpartition("_")
            is_part = part in MXFP4_PARTS and names.renamed(meant)[0] in names.known
            return meant, part if is_part else "", MXFP4_FORMAT
        owner, _, part = stored.rpartition(".")
        meant = f"{owner}.weight"
        form = quantization.stored_format_of(owner)
        if form is None or part not in {*form.stored_shapes(1, 1), *UNUSED_PARTS}:
            return meant, "", None
        return meant, part if names.renamed(meant)[1] is not None else "", form

    def _shape(self, meant: str) -> Shape:
        """As far as its parts tell."""
        form = self.formats[meant]
        if form == MXFP4_FORMAT:
            *first, num_groups, num_bytes = self._stored.get(f"{meant}_blocks", (0, 0, 0, 0))
            return (*first[:-1], num_groups * num_bytes * NUMBERS_PER_BYTE, first[-1])
        num_outputs, width = self._stored.get(f"{meant}_packed" if form.is_packed else meant, (0, 0))
        return num_outputs, width * form.num_stored_together

    def _expected(self, meant: str) -> Mapping[str, Shape]:
        form = self.formats[meant]
        if form == MXFP4_FORMAT:
            blocks = self._stored.get(f"{meant}_blocks", (0, 0, 0, 0))
            return {"blocks": blocks, "scales": blocks[:-1]}
        num_outputs, num_inputs = self.shapes[meant]
        return form.stored_shapes(num_outputs, num_inputs)
