"""How parts of a model are cut over ranks, in transformers' words and two of our own. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

COLWISE, ROWWISE, PACKED = "colwise", "rowwise", "packed_colwise"
# In no plan of transformers: a norm over the outputs of all ranks; and bare parameters or convolutions of
# which each rank has an equal piece.
NORM, EQUAL = "norm_over_ranks", "equal_pieces"


@dataclass(frozen=True)
class PlannedCut:
    """Of a module or a bare parameter.

    Attributes:
        style: transformers' word for it, :data:`NORM` or :data:`EQUAL`.
        parts: outputs of each of the joined projections (``packed_colwise``) of a linear layer, empty where
            the plan does not tell how they are joined; of :data:`EQUAL` widths of joined channels, which are
            one by default.
    """

    style: str
    parts: tuple[int, ...] = ()
