"""Which kinds of recurrent modules there are, which of a model's modules are of them, and how much memory
these take and a pass moves, from a model without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from specdist.models.cache.prefix_states import Rollback
from specdist.models.recurrent.gated_delta import gated_delta
from specdist.models.recurrent.mamba import Mamba1, Mamba2
from specdist.models.recurrent.mixers import Mixer
from specdist.models.recurrent.runs import STATE_DTYPE, StateShape
from specdist.models.recurrent.short_convolution import short_convolution

# Each tells the mixer of a module that has its parts.
KINDS: tuple[Callable[[nn.Module], Mixer | None], ...] = (
    gated_delta,
    short_convolution,
    Mamba2.of,
    Mamba1.of,
)

# A product and a sum of each number of a state: its decay, what it has for a key, what is added, what a query
# reads.
STATE_FLOPS = 8
# States before and after a pass, and what a chunk adds; of a token's row what is made of it in float32.
STATE_COPIES, ROW_COPIES = 3, 20


def mixer_of(module: nn.Module) -> Mixer | None:
    """The mixer of a module, by its parts; None of one that keeps no state."""
    return next((found for kind in KINDS if (found := kind(module)) is not None), None)


def mixers_of(model: nn.Module) -> dict[str, Mixer]:
    """A model's mixers, by the names of their modules."""
    found = ((name, mixer_of(module)) for name, module in model.named_modules())
    return {name: mixer for name, mixer in found if mixer is not None}


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
