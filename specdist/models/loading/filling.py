"""Fills a model's parameters, whole or this rank's part of them, with stored tensors as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.families.computed import build_without_weights
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import PackedExperts, fill_quantized, packed_experts_of
from specdist.models.loading.places import StoredPlaces
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.quantized.quantized_weights import QuantizedWeight
from specdist.models.recurrent.cuts import TURNED, Cut, cut_of


class Filling:
    """The parameters of a model that have memory, and what of them is still missing.

    Attributes:
        missing: parameters, stored buffers and quantised weights that are not filled yet.
    """

    def __init__(
        self, model: PreTrainedModel, checkpoint: Checkpoint, stored: StoredPlaces, dtype: torch.dtype
    ) -> None:
        self._model, self._checkpoint, self._stored, self._dtype = model, checkpoint, stored, dtype
        self._targets: dict[str, Tensor | QuantizedLinear | PackedExperts] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **{name: buffer for name, buffer in model.named_buffers() if name in stored.names.known},
            **{
                f"{name}.weight": layer
                for name, layer in model.named_modules()
                if isinstance(layer, QuantizedLinear)
            },
            **dict(packed_experts_of(model)),
        }
        self.missing = set(self._targets)
        # The parts of a quantised tensor, and of what is converted, may lie in several files.
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._collected: dict[str, dict[str, Tensor]] = {}

    def needs(self, stored_name: str) -> bool:
        """Whether any of a stored tensor belongs to the model."""
        tensor, part = self._stored.tensor_of(stored_name)
        if part and part not in self._stored.quantized.expected(tensor):
            return False
        return tensor in self._stored.collected or any(
            # Of what is zero, or of no width, here it is noted that it was there.
            name in self._targets
            and ((cut := self._cut_of(name)) is None or not any(cut.ranges) or bool(piece.on_rank(cut)))
            for name, piece in self._stored.places.get(tensor, ())
        )

    @torch.no_grad()
    def take(self, stored_name: str, whole: Tensor) -> None:
        """Take what belongs to the model; ``whole`` may be overwritten afterwards."""
        tensor, part = self._stored.tensor_of(stored_name)
        if not part:
            self._place(tensor, {tensor: whole})
            return
        found = self._parts.setdefault(tensor, {})
        found[part] = whole.clone()
        if set(self._stored.quantized.expected(tensor)) <= set(found):
            self._place(tensor, self._stored.quantized.matrices(tensor, self._parts.pop(tensor)))

    def _place(self, tensor: str, matrices: Mapping[str, Tensor | QuantizedWeight]) -> None:
        """Put a tensor where it belongs: itself, or the matrices of joined experts."""
        for name, piece in self._stored.places.get(tensor, ()):
            if name in self._targets:
                self._fill(name, piece, matrices[piece.source])
        conversion = self._stored.collected.get(tensor)
        if conversion is None:
            return
        found = self._collected.setdefault(conversion.name, {})
        found[tensor] = _plain(matrices[tensor]).clone()
        if set(found) == conversion.stored_names:
            made = conversion.converted(self._collected.pop(conversion.name), self._whole)
            for name in set(made) & set(self._targets):
                self._fill(name, Piece.whole(name, made[name].shape), made[name])

    def _fill(self, name: str, piece: Piece, whole: Tensor | QuantizedWeight) -> None:
        target = self._targets[name]
        if isinstance(whole, Tensor):
            whole = self._checkpoint.adapted(name, whole)
        if isinstance(target, Tensor):
            self._fill_plain(name, target, piece, whole)
        else:
            fill_quantized(target, piece, whole)
        self.missing.discard(name)

    def _fill_plain(self, name: str, target: Tensor, piece: Piece, whole: Tensor | QuantizedWeight) -> None:
        cut = self._cut_of(name)
        if cut is not None and not any(cut.ranges):
            target.zero_()
        owned = piece.on_rank(cut)
        numbers = _plain(whole) if owned else torch.empty(0)
        layer = self._model.get_submodule(name.rpartition(".")[0])
        if getattr(layer, TURNED, False) and target.dim() == 2:
            target = target.T
        for own in owned:
            local = target
            for dim, (begin, length) in enumerate(zip(own.begin, own.shape, strict=True)):
                local = local.narrow(dim, begin, length)
            local.copy_(own.of(numbers))

    def _cut_of(self, name: str) -> Cut | None:
        target = self._targets[name]
        if not isinstance(target, Tensor):
            return target.cut
        owner, _, leaf = name.rpartition(".")
        return cut_of(self._model.get_submodule(owner), leaf)

    @cached_property
    def _whole(self) -> PreTrainedModel:
        """The model without weights, for conversions that look at it."""
        return build_without_weights(self._checkpoint, self._dtype)


def _plain(whole: Tensor | QuantizedWeight) -> Tensor:
    return whole if isinstance(whole, Tensor) else whole.dequantized(torch.float32)
