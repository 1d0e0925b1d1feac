"""Where every stored tensor of a checkpoint lies in the whole model: one map for tensors that a parameter
takes as they are, for those that transformers joins or splits, and for the parts of quantised ones. And the
check, before any weight is read, that a checkpoint's configuration and weight files fit together.

A rank's own part of a place is :meth:`specdist.models.loading.conversions.Piece.on_rank`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specdist.models.families.dry_run import check_attention
from specdist.models.files.checkpoint import Checkpoint, build_model
from specdist.models.files.damage import reading
from specdist.models.files.weight_files import PLAIN_KINDS, open_weights
from specdist.models.loading.conversions import Conversion, Piece, Shape, conversions_of
from specdist.models.loading.packed_experts import Places
from specdist.models.loading.quantized_tensors import QuantizedTensors
from specdist.models.loading.weight_names import WeightNames
from specdist.models.quantized.quantized import (
    CONFIG_KEY,
    UNQUANTISED,
    looks_quantised,
    plain_config,
    quantization_of,
)
from specdist.utils.errors import UserError

NUM_SHOWN = 3


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


def check_weights(checkpoint: Checkpoint, tp_size: int) -> None:
    """Compare the model of the configuration with the headers of the weight files.

    Raises :class:`UserError` for a configuration from which no model, or one of other shapes, can be built,
    and for tensors that would be ignored or misread: quantised weights, and tensors that nothing in the model
    takes. Missing tensors are found when the files are read, but those of parameters that are stored split or
    joined are found here.
    """
    what = f"{checkpoint.option} {checkpoint.name}"
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    with reading(f"{what}: its weight files"):
        for path in checkpoint.weight_files:
            with open_weights(path) as file:
                shapes |= {name: file.shape(name) for name in file.names}
                kinds |= {name: file.kind(name) for name in file.names}
    num_layers = checkpoint.config.get_text_config().num_hidden_layers
    # Every layer has at least one tensor; with a damaged number, building layers could take hours.
    if not isinstance(num_layers, int) or not 0 < num_layers <= len(shapes):
        raise UserError(
            f"{what}: config.json names {num_layers} layers, but the files hold {len(shapes)} tensors: fetch "
            "both again"
        )
    with reading(f"{what}: config.json"), torch.device("meta"):
        model = build_model(copy.deepcopy(plain_config(checkpoint)), trusts_code=checkpoint.trusts_code)
    check_attention(model, what)
    stored = StoredPlaces.of(checkpoint, model, shapes, kinds)
    quantized, converted = stored.quantized, sorted(stored.converted)
    if converted and checkpoint.quantization is not None:
        raise UserError(
            f"{what} stores tensors ({_shown(converted)}) that {type(model).__name__} has split or "
            "joined, as those of single experts; such models are not quantised here: leave "
            f"{checkpoint.option}_quantization out"
        )
    if quantization_of(checkpoint) is not None and not quantized.layers and not quantized.parts:
        is_asked = checkpoint.quantization is not None
        remedy = (
            f"leave {checkpoint.option}_quantization out" if is_asked else "fetch an unquantised checkpoint"
        )
        raise UserError(
            f"{what}: none of its layers can be quantised ({type(model).__name__} has no plain linear layers "
            f"but its head): {remedy}"
        )
    quantized.check_borders(checkpoint, model, tp_size)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    left = []
    for tensor, shape in sorted(quantized.shapes.items()):
        taking = {name for name, _ in stored.places.get(tensor, ())}
        if not taking and tensor not in stored.converted and not stored.names.is_harmless(tensor):
            left.append(tensor)
        is_weight = tensor in stored.converted or not taking.isdisjoint(parameters)
        if is_weight and tensor not in quantized.formats and kinds[tensor] not in PLAIN_KINDS:
            raise UserError(
                f"{what}: {tensor} is stored as {kinds[tensor]}, and neither config.json nor another file "
                f"declares how it was quantised ({CONFIG_KEY}); its numbers alone are not the weight: "
                f"{UNQUANTISED}"
            )
        for name in taking & parameters.keys() if tensor not in stored.converted else ():
            if parameters[name].shape != shape:
                raise UserError(
                    f"{what}: {tensor} is of shape {list(shape)} in the files, but config.json asks for "
                    f"{list(parameters[name].shape)}: fetch both again"
                )
    quantised = [name for name in left if looks_quantised(name)]
    if quantised:
        raise UserError(
            f"{what}: {_shown(quantised)} looks like a part of quantised weights, and no file declares how "
            f"to read it; without it the weights would be wrong: {UNQUANTISED}"
        )
    if left:
        raise UserError(
            f"{what}: nothing in {type(model).__name__} takes {_shown(left)}: config.json is of another "
            "model than the weights, or they were changed; fetch both again, or remove these tensors if they "
            "are known to be of no use"
        )


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more
