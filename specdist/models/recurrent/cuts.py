"""How parts of a model are cut over ranks, in transformers' words and two of our own, and what one rank has
of a stored tensor. No tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COLWISE, ROWWISE, PACKED = "colwise", "rowwise", "packed_colwise"
# In no plan of transformers: a norm over the outputs of all ranks; and bare parameters or convolutions of
# which each rank has an equal piece.
NORM, EQUAL = "norm_over_ranks", "equal_pieces"
# DeepSpeed cuts inputs and outputs of linear layers between such numbers.
GRAIN = 64
# The attribute of a module with the cut of each of its parameters that is cut.
CUTS = "cuts_of_parameters"
# The attribute of a layer whose weight the files hold transposed.
TURNED = "is_stored_transposed"


@dataclass(frozen=True)
class Cut:
    """One rank's part of a stored tensor: its ``ranges`` of a dimension, one after the other. Without ranges
    the tensor is added once, on the first rank, and is zero on the others. ``sizes``: of the parts of all
    ranks, where the inputs of a layer are cut."""

    dim: int
    ranges: tuple[range, ...]
    sizes: tuple[int, ...] = ()


def cut_of(module: object, leaf: str) -> Cut | None:
    """The cut of a module's parameter; None for one that is whole."""
    cuts: Mapping[str, Cut] = getattr(module, CUTS, {})
    return cuts.get(leaf)


@dataclass(frozen=True)
class PlannedCut:
    """How a module or a bare parameter is cut.

    Attributes:
        style: transformers' word for it, :data:`NORM` or :data:`EQUAL`.
        parts: outputs of each of the joined projections (``packed_colwise``) of a linear layer, empty where
            the plan does not tell how they are joined; of :data:`EQUAL` widths of joined channels, which are
            one by default.
        is_of_heads: it is cut between heads, in equal pieces, and not as feed-forward parts are.
        num_kv_heads: of keys or values: alone, or as the last two of three parts.
    """

    style: str
    parts: tuple[int, ...] = ()
    is_of_heads: bool = False
    num_kv_heads: int = 0

    def num_of_keys(self, num_numbers: int) -> int:
        """How many of a weight's numbers make keys and values."""
        if not self.num_kv_heads:
            return 0
        return num_numbers * sum(self.parts[1:]) // sum(self.parts) if self.parts else num_numbers

    def num_repeats(self, num_ranks: int) -> int:
        """Ranks that have the same key/value head. Raises ValueError if it is not the same for all heads."""
        if not self.num_kv_heads or self.num_kv_heads % num_ranks == 0:
            return 1
        repeats, rest = divmod(num_ranks, self.num_kv_heads)
        if rest:
            raise ValueError(f"{num_ranks} ranks do not divide {self.num_kv_heads} key/value heads")
        return repeats
