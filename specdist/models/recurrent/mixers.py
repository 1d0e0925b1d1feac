"""Layers that mix tokens by a state: how such a module of transformers runs in a pass over states.

Its projections, norms and gates are its own; the convolution and the recurrence between them are ours, since
those of transformers know one sequence, one state and no way back. What a module is follows from the parts
that it has (:data:`specdist.models.recurrent.kinds.KINDS`). Outside of passes it runs as transformers wrote
it.

T flat tokens, S segments, L places of a segment, Q new tokens of it, R numbers of a row, E hidden size, O
numbers of an output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import LayerAttention
from specdist.models.passes.flat import FlatBatch
from specdist.models.recurrent.cuts import PlannedCut
from specdist.models.recurrent.states import Places, RecurrentStates, SlotStates, StateShape


class Mixer(Protocol):
    """One module. Its sizes are those of this rank's part."""

    @property
    def layer(self) -> int:
        """Its number in the model."""
        ...

    @property
    def shape(self) -> StateShape: ...

    @property
    def cuts(self) -> Mapping[str, PlannedCut]:
        """Of a whole module: how its parts are cut over ranks."""
        ...

    @property
    def num_pieces(self) -> int:
        """Of a whole module: the most ranks that it can be cut over, which any number must divide."""
        ...

    def project(self, hidden_TE: Tensor) -> tuple[Tensor, Any]:
        """Rows [T, R], all that later tokens need of each; and what :meth:`output` needs besides."""
        ...

    def scan(self, rows_SLR: Tensor, states: SlotStates, places: Places) -> Tensor:
        """Outputs [S, Q, O] of the new tokens; each slot then has the state at its segment's border. L begins
        with what is before carried and new places. Places without a token are zeros."""
        ...

    def output(self, mixed_TO: Tensor, rest: Any) -> Tensor:
        """[T, E]."""
        ...


class Mixing(Protocol):
    """What recurrent layers call once each."""

    def mix(self, mixer: Mixer, rows_TR: Tensor) -> Tensor:
        """Outputs [T, O] of the tokens' rows."""
        ...


class StatePass:
    """One pass of a model with recurrent layers, and perhaps others that attend."""

    def __init__(self, attention: LayerAttention, states: RecurrentStates, batch: FlatBatch) -> None:
        self.attend = attention.attend
        self._states, self._plan = states, states.plan(batch)

    def mix(self, mixer: Mixer, rows_TR: Tensor) -> Tensor:
        states, layer, groups = self._states, mixer.layer, self._plan.groups
        ring, held = states.rows[layer].flatten(0, 1), states.states.get(layer, rows_TR.new_empty(0))
        num_unread = states.num_before - mixer.shape.num_before
        mixed_TO: Tensor | None = None
        for group in groups:
            carried = ring[group.carried_SL].where(group.has_carried_SL[..., None], 0.0)
            new = rows_TR[group.new_SQ].where(group.has_new_SQ[..., None], 0.0)
            rows_SLR = torch.cat((carried, new), dim=1)[:, num_unread:]
            own = SlotStates(held, group.slots_S, group.is_first_S)
            mixed_SQO = mixer.scan(rows_SLR, own, group.places)
            if mixed_TO is None:
                mixed_TO = mixed_SQO.new_empty(len(rows_TR), mixed_SQO.shape[-1])
            sources, targets = group.outputs
            mixed_TO[targets] = mixed_SQO.flatten(0, 1)[sources]
        tokens, places = self._plan.kept
        ring.index_copy_(0, places, rows_TR[tokens])
        assert mixed_TO is not None
        return mixed_TO


def one_token(mixer: Mixer, rows_1R: Tensor) -> Tensor:
    """Outputs [1, O] of a sequence's only token, for a dry run."""
    shape, device = mixer.shape, rows_1R.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    is_live = torch.ones(1, 1, dtype=torch.bool, device=device)
    places = Places(shape.num_before, 0, 1, is_live, np.zeros(1, np.int64), zero)
    states = SlotStates(torch.zeros(1, *(shape.state or (0,)), device=device), zero, is_live[0])
    rows = torch.cat((rows_1R.new_zeros(shape.num_before, rows_1R.shape[1]), rows_1R))
    return mixer.scan(rows[None], states, places)[0]
