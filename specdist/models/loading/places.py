"""Where every stored tensor of a checkpoint lies in the whole model: one map for tensors that a parameter
takes as they are, for those that transformers joins or splits, and for the parts of quantised ones.

A rank's own part of a place is :meth:`specdist.models.loading.conversions.Piece.on_rank`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from specdist.models.files.checkpoint import Checkpoint
from specdist.models.loading.conversions import Conversion, Piece, Shape, conversions_of
from specdist.models.loading.packed_experts import Places
from specdist.models.loading.quantized_tensors import QuantizedTensors
from specdist.models.loading.weight_names import WeightNames
from specdist.models.quantized.quantized import quantization_of


@dataclass(frozen=True)
class StoredPlaces:
    """The places of a checkpoint's tensors in a whole model. Quantised tensors stand for their parts.

    Attributes:
        names: of the model's parameters and stored buffers.
        quantized: which stored tensors are parts of quantised ones.
        converted: the tensors that transformers joins or splits.
        places: by tensor the parameters that take a part of it, each with the part.
        collected: the tensors that only transformers can convert, each with all others of its conversion.
    """

    names: WeightNames
    quantized: QuantizedTensors
    converted: frozenset[str]
    places: Mapping[str, Sequence[tuple[str, Piece]]]
    collected: Mapping[str, Conversion]

    @staticmethod
    def of(
        checkpoint: Checkpoint,
        model: PreTrainedModel,
        shapes: Mapping[str, Shape],
        kinds: Mapping[str, str] | None = None,
    ) -> StoredPlaces:
        """The places of the stored tensors of these ``shapes`` in a whole ``model``; with their ``kinds`` of
        numbers the parts of quantised tensors are checked, too. Raises :class:`UserError` for tensors that do
        not make the model."""
        names = WeightNames(model)
        shapes = {stored: shape for stored, shape in shapes.items() if not names.is_of_another(stored)}
        quantized = QuantizedTensors(model, names, quantization_of(checkpoint), shapes)
        if kinds is not None:
            quantized.check(checkpoint, kinds)
        places, collected = conversions_of(checkpoint, model, names, quantized.shapes)
        converted = frozenset({*places, *collected})
        taken = names.takers(quantized.shapes)
        taken |= {name: {name} for name in quantized.formats if name not in quantized.shapes}
        for tensor, takers in taken.items():
            if tensor not in converted:
                is_plain = tensor not in quantized.formats
                pieces = [Piece.whole(tensor, shapes[tensor])] if is_plain else quantized.pieces(tensor)
                places[tensor] = [(name, piece) for name in takers for piece in pieces]
        return StoredPlaces(names, quantized, converted, places, collected)

    def tensor_of(self, stored: str) -> tuple[str, str]:
        """The tensor that a stored one belongs to, and which part of it it is; no part if it is all. No name
        if it is of another model."""
        if self.names.is_of_another(stored):
            return "", ""
        return self.quantized.parts.get(stored, (stored, ""))

    @property
    def of_quantized(self) -> Places:
        """The tensors that make each parameter to which a quantised tensor belongs."""
        found: dict[str, list[tuple[str, Piece]]] = {}
        for tensor, places in self.places.items():
            for name, piece in places:
                found.setdefault(name, []).append((tensor, piece))
        formats = self.quantized.formats
        return {name: each for name, each in found.items() if any(tensor in formats for tensor, _ in each)}
