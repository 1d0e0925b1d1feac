"""A LoRA adapter that is added to the weights of a model while they are read: W' = W + s B A (Hu et al. 2021,
arXiv:2106.09685), s = alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023, arXiv:2312.03732).

A whole matrix is merged before it is cut or quantised, so the model is the same on any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdist.models.files.weight_files import StoredTensors, open_weights


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """The update of one matrix, by the names of its tensors in the file: A [r, inputs], B [outputs, r].

    Attributes:
        is_transposed: the matrix is stored as [inputs, outputs] (embeddings, GPT-2's Conv1D).
    """

    a: str
    b: str
    scale: float
    is_transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class LoraAdapter:
    """What a PEFT folder says of a model's parameters, by their names in the whole model.

    Attributes:
        folder, files: where it is, and its configuration and weights there.
        updates: matrices with a low-rank update.
        replaced: parameters that were trained whole (``modules_to_save``, biases), and their stored tensors.
    """

    name: str
    folder: Path
    files: tuple[Path, Path]
    updates: Mapping[str, LowRank]
    replaced: Mapping[str, str]

    @property
    def parameters(self) -> frozenset[str]:
        """All that it changes."""
        return frozenset({*self.updates, *self.replaced})

    def fingerprint(self) -> str:
        """A digest of the whole adapter."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                while piece := file.read(2**20):
                    digest.update(piece)
        return digest.hexdigest()

    def merged(self, parameter: str, whole: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """A parameter of the model with the adapter, in float32 if it changes; ``whole`` has only these
        ``rows``, or all."""
        if parameter not in self.updates and parameter not in self.replaced:
            return whole
        with open_weights(self.files[1]) as file:
            if parameter in self.replaced:
                stored = self.replaced[parameter]
                whole = file.read(stored) if rows is None else file.rows(stored, rows)
            whole = whole.to(torch.float32)
            update = self.updates.get(parameter)
            return whole if update is None else _updated(file, update, whole, rows)


def _updated(file: StoredTensors, update: LowRank, weight: Tensor, rows: Sequence[int] | None) -> Tensor:
    a, b = (file.read(name).to(torch.float32) for name in (update.a, update.b))
    left, right = (a.T, b.T) if update.is_transposed else (b, a)
    if rows is not None:
        left = left[list(rows)]
    return torch.addmm(weight, left, right, alpha=update.scale)
