"""What a round can run into: memory that does not suffice, and logits that are not finite.

Neither costs other rows anything: a row that has begun a block goes back to its beginning and repeats it with
the same random numbers, as after any preemption.
"""

from __future__ import annotations

import torch

from specdist.engine.sequence import Sequence
from specdist.utils.errors import UserError

# So many rows without a distribution, and none with one, are not an accident of single rows.
NUM_SUSPECT_ROWS = 8
# What torch's allocators, and the libraries that have their own, say in plain RuntimeErrors.
MEMORY_COMPLAINTS = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")


class DraftOutOfMemory(RuntimeError):
    """The draft, on a rank of its own, could not do what it was asked, and waits for the next request."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch might have gone through."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError, DraftOutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_COMPLAINTS)


def first_line(error: BaseException) -> str:
    """An error's type and the beginning of its text, for messages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def not_finite(sequence: Sequence) -> str:
    """Why a row has ended whose next token could not be made; the first token of a prompt is position 0."""
    return (
        f"the target's logits for the token at position {len(sequence.token_ids)} (of prompt and completion) "
        "are not finite: NaN or infinite"
    )


def too_large(error: str) -> str:
    """Why a row has ended that ran alone."""
    return f"the row does not fit into the device's memory, not even alone ({error})"


class NonFiniteGuard:
    """Whether the rows without finite logits are single ones, or all of them.

    They are held back until another row has had finite ones. If none has, nothing is written down: the target
    itself is broken.
    """

    def __init__(self) -> None:
        self._held: list[Sequence] = []
        self._is_lifted = False

    def lift(self) -> None:
        """A row had finite logits."""
        self._is_lifted = True

    def released(self, finished: list[Sequence], *, is_end: bool = False) -> list[Sequence]:
        """Of these rows, and those held back before, all that may be written down now; at the end of all
        requests that is each.

        Raises :class:`UserError` when enough were seen.
        """
        held = [sequence for sequence in finished if sequence.has_nonfinite_logits]
        if self._is_lifted or is_end:
            released, self._held = self._held + finished, []
            return released
        self._held += held
        if len(self._held) >= NUM_SUSPECT_ROWS:
            raise UserError(
                f"the target's logits are not finite (NaN or infinite) in all of the first {len(self._held)} "
                "rows: its checkpoint is damaged, or its numbers are too large for this --dtype. Nothing was "
                "written down for these rows. Use --dtype float32 (with another --output), or get the "
                "checkpoint's files again"
            )
        return [sequence for sequence in finished if not sequence.has_nonfinite_logits]
