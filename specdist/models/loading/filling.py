"""Fills a model's parameters, whole or this rank's part of them, with stored tensors as they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.families.computed import build_without_weights
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.loading.conversions import Conversion, Conversions, Piece, Shape, conversions_of
from specdist.models.loading.narrow_experts import narrow_experts_of
from specdist.models.loading.narrow_placing import Places
from specdist.models.loading.quantized_experts import QuantizedExperts
from specdist.models.loading.quantized_loading import QuantizedParts
from specdist.models.loading.weight_names import WeightNames
from specdist.models.quantized.quantized import quantization_of
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.quantized.quantized_weights import QuantizedWeight
from specdist.models.sharding.cutting import VocabParallelHead, cut_tensor
from specdist.models.sharding.experts import ExpertsCut, cut_of


@dataclass(frozen=True)
class StoredNames:
    """How stored tensors make a whole model: by name those that take each as it is, and the conversions of
    the others; ``known``: its parameters and stored buffers. What is made of quantised ``experts`` has a name
    like a stored tensor."""

    known: Collection[str]
    experts: QuantizedExperts
    takers: Mapping[str, set[str]]
    conversions: Conversions

    @staticmethod
    def of(checkpoint: Checkpoint, model: PreTrainedModel, shapes: Mapping[str, Shape]) -> StoredNames:
        """``model``: whole. Raises :class:`UserError` for tensors that do not make it."""
        names = WeightNames(model)
        experts = QuantizedExperts(names, quantization_of(checkpoint), shapes)
        conversions = conversions_of(checkpoint, model, names, experts.shapes)
        takers = {
            name: set() if name in conversions.stored_names else taken
            for name, taken in names.takers(experts.shapes).items()
        }
        return StoredNames(set(names.known), experts, takers, conversions)

    @property
    def stored(self) -> set[str]:
        return {*self.takers, *self.experts.places}

    @property
    def expert_places(self) -> Places:
        """What of quantised experts lies where in joined parameters."""
        found: dict[str, list[tuple[str, Piece]]] = {}
        for meant in self.experts.formats:
            joined = self.experts.shapes[meant]
            for name in self.takers[meant] if len(joined) > 2 else ():
                found.setdefault(name, []).append((meant, _of_joined(meant, 0, joined)))
            for name, piece in self.conversions.places.get(meant, ()):
                found.setdefault(name, []).append((meant, piece))
        return found


def _of_joined(meant: str, expert: int, shape: Shape) -> Piece:
    """The matrix of one of those of a joined tensor [E, K, N], stored as [N, K]."""
    turned = (("transpose", (0, 1)), ("unsqueeze", (0,)))
    return Piece(meant, (expert, 0, 0), (1, *shape[1:]), turned)


class Filling:
    """Of a model whose parameters have memory.

    Attributes:
        missing: parameters, stored buffers and quantised layers that are not filled yet.
        num_cut: how many weights DeepSpeed has cut.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        stored: StoredNames,
        parts: QuantizedParts | None,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._checkpoint, self._stored, self._dtype = model, checkpoint, stored, dtype
        self._wanted: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._wanted |= {name: buffer for name, buffer in model.named_buffers() if name in stored.known}
        self._layers = {
            name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)
        }
        self._narrow = dict(narrow_experts_of(model))
        self.missing = set(self._wanted) | set(self._layers) | set(self._narrow)
        self.num_cut = sum(layer.cut is not None for layer in self._layers.values())
        self._parts = parts
        self._parts_of = parts.of(stored.takers) if parts is not None else {}
        # The parts of a layer, and of what is converted, may lie in several files.
        self._pending: dict[str, dict[str, Tensor]] = {}
        self._collected: dict[str, dict[str, Tensor]] = {}

    def needs(self, stored_name: str) -> bool:
        """Whether any of it belongs to the model."""
        conversions = self._stored.conversions
        stored_name, _ = self._stored.experts.places.get(stored_name, (stored_name, ""))
        wanted = self._wanted.keys() | self._narrow.keys()
        return (
            not self._stored.takers[stored_name].isdisjoint(wanted)
            or self._parts_of.get(stored_name, ("",))[0] in self._layers
            or any(self._needs_piece(*place) for place in conversions.places.get(stored_name, ()))
            or stored_name in conversions.collected
        )

    @torch.no_grad()
    def take(self, stored_name: str, whole: Tensor) -> None:
        """Take what belongs to the model; ``whole`` may be overwritten afterwards."""
        experts = self._stored.experts
        meant, part = experts.places.get(stored_name, ("", ""))
        if not part:
            self._take_whole(stored_name, whole)
            return
        found = self._pending.setdefault(meant, {})
        found[part] = whole.clone()
        if experts.is_complete(meant, found):
            for expert, weight in experts.weights(meant, self._pending.pop(meant)):
                self._take_expert(meant, expert, weight)

    def _take_whole(self, stored_name: str, whole: Tensor) -> None:
        layer_name, part = self._parts_of.get(stored_name, ("", ""))
        if layer_name in self._layers:
            self._take_part(layer_name, part, whole)
        for name in self._stored.takers[stored_name] & set(self._wanted):
            self._fill(name, self._checkpoint.adapted(name, whole))
        conversions = self._stored.conversions
        for name, piece in conversions.places.get(stored_name, ()):
            if name in self._wanted:
                self._place(name, piece, whole)
        conversion = conversions.collected.get(stored_name)
        if conversion is not None:
            self._collect(conversion, stored_name, whole)

    def _take_expert(self, meant: str, expert: int | None, weight: QuantizedWeight) -> None:
        """A matrix, perhaps one of those of a joined tensor, that stays narrow or becomes plain numbers."""
        places = self._stored.conversions.places.get(meant, ())
        if expert is not None:
            piece = _of_joined(meant, expert, self._stored.experts.shapes[meant])
            places = [(name, piece) for name in self._stored.takers[meant]]
        for name, piece in places:
            if name in self._narrow:
                self._narrow[name].fill(piece.begin, weight)
                self.missing.discard(name)
            elif expert is not None and name in self._wanted:
                self._place(name, piece, weight.dequantized(torch.float32))
        if expert is None and not any(name in self._narrow for name, _ in places):
            self._take_whole(meant, weight.dequantized(torch.float32))

    def _take_part(self, layer: str, part: str, whole: Tensor) -> None:
        assert self._parts is not None
        found = self._pending.setdefault(layer, {})
        merged = self._checkpoint.adapted(f"{layer}.weight", whole) if part == "weight" else whole
        found[part] = whole.clone() if merged is whole else merged
        if set(self._parts.expected(layer)) <= set(found):
            self._layers[layer].fill(self._parts.weight(layer, found), self._pending.pop(layer))
            self.missing.discard(layer)

    def _fill(self, name: str, whole: Tensor) -> None:
        layer = self._layer_of(name)
        if self._cut_of(name) is not None:
            self._place(name, Piece(name, (0,) * whole.dim(), tuple(whole.shape)), whole)
            return
        local = cut_tensor(layer, self._wanted[name], whole, self._dtype)
        self._wanted[name].copy_(local)
        # The head does not count: it is cut by this package, not by DeepSpeed.
        self.num_cut += local.shape != whole.shape and not isinstance(layer, VocabParallelHead)
        self.missing.discard(name)

    def _place(self, name: str, piece: Piece, whole: Tensor) -> None:
        cut = self._cut_of(name)
        for each in [piece] if cut is None else piece.of_ranges(cut.dim, cut.ranges):
            local = self._wanted[name]
            for dim, (begin, length) in enumerate(zip(each.begin, each.shape, strict=True)):
                local = local.narrow(dim, begin, length)
            local.copy_(each.of(whole))
        if cut is not None and not cut.ranges:
            self._wanted[name].zero_()
        self.missing.discard(name)

    def _needs_piece(self, name: str, piece: Piece) -> bool:
        narrow = self._narrow.get(name)
        if narrow is None and name not in self._wanted:
            return False
        cut = self._cut_of(name) if narrow is None else narrow.cut
        # Of what is zero here it is noted that it was there.
        return cut is None or not cut.ranges or bool(piece.of_ranges(cut.dim, cut.ranges))

    def _cut_of(self, name: str) -> ExpertsCut | None:
        return cut_of(self._layer_of(name), name.rpartition(".")[2])

    def _collect(self, conversion: Conversion, stored_name: str, whole: Tensor) -> None:
        found = self._collected.setdefault(conversion.name, {})
        found[stored_name] = whole.clone()
        if set(found) == conversion.stored_names:
            made = conversion.converted(self._collected.pop(conversion.name), self._whole)
            for name in set(made) & set(self._wanted):
                self._fill(name, made[name])

    @cached_property
    def _whole(self) -> PreTrainedModel:
        """Without weights, for conversions that look at it."""
        return build_without_weights(self._checkpoint, self._dtype)

    def _layer_of(self, name: str) -> nn.Module:
        return self._model.get_submodule(name.rpartition(".")[0])
