"""Experts that are stored quantised: their parts, and the plain numbers that they become while they are read.

No product here takes narrow experts, so in memory they are plain numbers of the run's dtype, and their inputs
are not rounded. In files they lie one by one, in the layouts of linear layers, or joined (MXFP4: numbers of
four bits, of which 32 share a power of two; OCP Microscaling Formats 1.0).

E experts, N outputs, K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor

from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.conversions import Shape
from specdist.models.files.weight_names import WeightNames
from specdist.models.quantized.quantized import MXFP4, Quantization
from specdist.models.quantized.quantized_loading import (
    PART_KINDS,
    UNUSED_PARTS,
    part_missing,
    part_of_other_kind,
    part_of_other_shape,
)
from specdist.models.quantized.quantized_weights import BITS, WORD_BITS, LayerFormat, from_stored

# Of four bits: a sign, two of an exponent, and one of a fraction.
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_PARTS, MXFP4_KIND = ("blocks", "scales"), "U8"
EXPONENT_BIAS, NUMBERS_PER_BYTE = 127, 2


class QuantizedExperts:
    """Which stored tensors are parts of which tensor of experts.

    Attributes:
        places: by stored tensor the tensor that is meant, and which part of it it is.
        shapes: of all stored tensors, with those that are meant in the place of their parts.
    """

    def __init__(
        self, names: WeightNames, quantization: Quantization | None, shapes: Mapping[str, Shape]
    ) -> None:
        self.places: dict[str, tuple[str, str]] = {}
        self.shapes = dict(shapes)
        self._formats: dict[str, LayerFormat | None] = {}
        self._stored = shapes
        for stored in shapes if quantization is not None else ():
            assert quantization is not None
            meant, part, form = self._place(names, quantization, stored)
            if part:
                self.places[stored] = (meant, part)
                self._formats[meant] = form
        for stored in self.places:
            del self.shapes[stored]
        self.shapes |= {meant: self._shape(meant) for meant in self._formats}

    @property
    def meant(self) -> Set[str]:
        return self._formats.keys()

    @property
    def num_numbers(self) -> int:
        """In all of them."""
        return sum(math.prod(self.shapes[meant]) for meant in self._formats)

    def is_complete(self, meant: str, parts: Mapping[str, Tensor]) -> bool:
        return set(self._expected(meant)) <= set(parts)

    def numbers(self, meant: str, parts: Mapping[str, Tensor]) -> Iterator[tuple[int | None, Tensor]]:
        """Its plain numbers in float32, or those of one joined expert after the other with its number."""
        form = self._formats[meant]
        if form is not None:
            num_outputs, num_inputs = self.shapes[meant]
            yield None, from_stored(form, parts, (num_outputs, num_inputs)).dequantized(torch.float32)
            return
        for expert, (blocks, scales) in enumerate(zip(parts["blocks"], parts["scales"], strict=True)):
            yield expert, float4_numbers(blocks, scales).T

    def check(self, checkpoint: Checkpoint, kinds: Mapping[str, str]) -> None:
        """Raises :class:`UserError` for parts that are missing, or of another shape or kind of number."""
        what = f"{checkpoint.option} {checkpoint.name}"
        found = {place: stored for stored, place in self.places.items()}
        for meant, form in self._formats.items():
            for part, shape in self._expected(meant).items():
                stored = found.get((meant, part))
                if stored is None:
                    raise part_missing(what, f"{part} of {meant}", form or MXFP4)
                given = self._stored[stored]
                if math.prod(given) != math.prod(shape) or (len(shape) > 1 and given[0] != shape[0]):
                    raise part_of_other_shape(what, stored, given, shape, form or MXFP4)
                allowed = {MXFP4_KIND} if form is None else PART_KINDS[part]
                if kinds[stored] not in allowed:
                    raise part_of_other_kind(what, stored, kinds[stored], form or MXFP4)

    def _place(
        self, names: WeightNames, quantization: Quantization, stored: str
    ) -> tuple[str, str, LayerFormat | None]:
        if quantization.has_mxfp4_experts:
            meant, _, part = stored.rpartition("_")
            is_part = part in MXFP4_PARTS and names.renamed(meant)[0] in names.known
            return meant, part if is_part else "", None
        owner, _, part = stored.rpartition(".")
        meant = f"{owner}.weight"
        form = quantization.stored_format_of(owner)
        if form is None or part not in {*form.stored_shapes(1, 1), *UNUSED_PARTS}:
            return meant, "", None
        return meant, part if names.renamed(meant)[1] is not None else "", form

    def _shape(self, meant: str) -> Shape:
        """As far as its parts tell."""
        form = self._formats[meant]
        if form is None:
            *first, num_groups, num_bytes = self._stored.get(f"{meant}_blocks", (0, 0, 0, 0))
            return (*first[:-1], num_groups * num_bytes * NUMBERS_PER_BYTE, first[-1])
        if not form.is_packed:
            return self._stored.get(meant, (0, 0))
        num_outputs, num_words = self._stored.get(f"{meant}_packed", (0, 0))
        return num_outputs, num_words * WORD_BITS // BITS[form.numbers]

    def _expected(self, meant: str) -> Mapping[str, Shape]:
        form = self._formats[meant]
        if form is None:
            blocks = self._stored.get(f"{meant}_blocks", (0, 0, 0, 0))
            return {"blocks": blocks, "scales": blocks[:-1]}
        num_outputs, num_inputs = self.shapes[meant]
        return form.stored_shapes(num_outputs, num_inputs)


def float4_numbers(blocks_NGB: Tensor, scales_NG: Tensor) -> Tensor:
    """[N, K] float32 of G groups in each row, two numbers in each byte, the first in its lower half."""
    values = torch.tensor(FLOAT4, device=blocks_NGB.device)
    halves = torch.stack([blocks_NGB & 15, blocks_NGB >> 4], dim=-1).flatten(-2)
    powers_NG = scales_NG.to(torch.int32) - EXPONENT_BIAS
    return torch.ldexp(values[halves.to(torch.int64)], powers_NG[..., None]).flatten(1)
