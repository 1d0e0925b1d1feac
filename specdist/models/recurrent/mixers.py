"""Layers that mix tokens by a state: how such a module of transformers runs in a pass over states.

Its projections, norms and gates are its own; the convolution and the recurrence between them are ours, since
those of transformers know one sequence, one state and no way back. What a module is follows from the parts
that it has (:data:`specdist.models.recurrent.kinds.KINDS`). Outside of passes it runs as transformers wrote
it.

T flat tokens, L places with rows, N places that are run, R numbers of a row, E hidden size, O numbers of an
output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specdist.models.recurrent.cuts import PlannedCut
from specdist.models.recurrent.runs import Runs, StateShape, padded_of


class Mixer(ABC):
    """One module. Its sizes are those of this rank's part."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def layer(self) -> int:
        """The number of the layer in the model."""
        return int(self.module.layer_idx)

    @property
    @abstractmethod
    def shape(self) -> StateShape: ...

    @property
    @abstractmethod
    def cuts(self) -> Mapping[str, PlannedCut]:
        """How the parts of a whole module are cut over ranks."""

    @property
    @abstractmethod
    def num_pieces(self) -> int:
        """The most ranks that a whole module can be cut over, which any number must divide."""

    @abstractmethod
    def project(self, hidden_TE: Tensor) -> tuple[Tensor, Any]:
        """Rows [T, R], all that later tokens need of each; and what :meth:`output` needs besides."""

    @abstractmethod
    def scan(self, rows_LR: Tensor, held: Tensor, runs: Sequence[Runs]) -> Tensor:
        """Outputs [N, O] of the runs, and anything between them; each slot then has the state that they say.
        L are as many more, at first, as a token needs before it. ``held``: states of all slots."""

    @abstractmethod
    def output(self, mixed_TO: Tensor, rest: Any) -> Tensor:
        """[T, E]."""


def one_token(mixer: Mixer, rows_1R: Tensor) -> Tensor:
    """Outputs [1, O] of a sequence's only token, for a dry run."""
    shape, device = mixer.shape, rows_1R.device
    numbers_51 = np.array([[0], [1], [0], [1], [0]])
    runs = Runs(torch.from_numpy(numbers_51).to(device), padded_of(numbers_51, device))
    rows = torch.cat((rows_1R.new_zeros(shape.num_before, rows_1R.shape[1]), rows_1R))
    return mixer.scan(rows, torch.zeros(1, *shape.state, device=device), [runs])


def has_parts(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(getattr(module, name, None) is not None for name in names)
