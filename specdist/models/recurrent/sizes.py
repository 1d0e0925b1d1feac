"""How much memory recurrent layers take, and how much of it a pass moves, from a model without weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from specdist.models.recurrent.kinds import mixers_of
from specdist.models.recurrent.rollback import Rollback
from specdist.models.recurrent.runs import STATE_DTYPE, StateShape

# A product and a sum of each number of a state: its decay, what it has for a key, what is added, what a query
# reads.
STATE_FLOPS = 8
# States before and after a pass, and what a chunk adds; of a token's row what is made of it in float32.
STATE_COPIES, ROW_COPIES = 3, 20


@dataclass(frozen=True)
class StateSizes:
    """States of a model's recurrent layers, those that tensor parallelism cuts apart from the others;
    ``num_pieces``: which the number of ranks must divide."""

    cut: tuple[StateShape, ...] = ()
    whole: tuple[StateShape, ...] = ()
    num_pieces: frozenset[int] = frozenset()

    @staticmethod
    def of(model: nn.Module) -> StateSizes:
        mixers = mixers_of(model).values()
        return StateSizes(
            tuple(mixer.shape for mixer in mixers if mixer.cuts),
            tuple(mixer.shape for mixer in mixers if not mixer.cuts),
            frozenset(mixer.num_pieces for mixer in mixers if mixer.cuts),
        )

    def slot_bytes(self, tp_size: int, rollback: Rollback, number_bytes: int) -> int:
        """Bytes of a sequence on one rank, of any length."""
        cut, whole = (
            sum(shape.num_bytes(rollback, number_bytes) for shape in shapes)
            for shapes in (self.cut, self.whole)
        )
        return cut // tp_size + whole

    def state_bytes(self, tp_size: int) -> int:
        """Bytes of the states alone: a pass reads and writes those of its sequences."""
        cut, whole = (sum(shape.num_numbers for shape in shapes) for shapes in (self.cut, self.whole))
        return (cut // tp_size + whole) * STATE_DTYPE.itemsize

    def flops(self, tp_size: int) -> float:
        """Operations of a token on one rank."""
        return STATE_FLOPS / STATE_DTYPE.itemsize * self.state_bytes(tp_size)

    def pass_bytes(self, tp_size: int, num_seqs: int, num_tokens: int, number_bytes: int) -> int:
        """The most that a layer holds at a time in a pass, beside the slots."""
        shapes = (*self.cut, *self.whole)
        state = max((shape.num_numbers for shape in shapes), default=0)
        row = max((shape.row_width for shape in shapes), default=0)
        of_states = num_seqs * STATE_COPIES * state * STATE_DTYPE.itemsize
        of_rows = num_tokens * row * (2 * number_bytes + ROW_COPIES * STATE_DTYPE.itemsize)
        return (of_states + of_rows) // (1 if self.whole else tp_size)


NO_STATES = StateSizes()
