"""Failures of a round: lack of memory, and logits that are not finite.

Neither changes other sequences: one that has begun a block repeats it with the same random numbers, as after
any preemption.
"""

from __future__ import annotations

import torch

from specdist.engine.schedule.sequence import Sequence
from specdist.utils.errors import UserError

# If this many sequences have non-finite logits and none has finite ones, the model is at fault.
NUM_SUSPECT_ROWS = 8
# In the RuntimeErrors of torch's allocators, and of libraries that allocate themselves.
OUT_OF_MEMORY_TEXTS = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
DRAFT_NOT_FINITE = (
    "the draft's logits are not finite (NaN or infinite) at some positions: no tokens are drafted there"
)


class DraftOutOfMemory(RuntimeError):
    """The draft ran out of memory, of which no rank of the target knows; it waits for the next request."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch might succeed."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError, DraftOutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def not_finite(sequence: Sequence) -> str:
    """The error of a sequence without a next token. A prompt's first token has position 0."""
    return (
        f"the target's logits for the token at position {len(sequence.token_ids)} (of prompt and completion) "
        "are not finite: NaN or infinite"
    )


def too_large(error: str) -> str:
    """The error of a sequence that ran out of memory alone."""
    return f"the row does not fit into the device's memory, not even alone ({error})"


class NonFiniteGuard:
    """Tells single sequences with non-finite logits from a target all of whose logits are.

    Sequences that ended for non-finite logits are held back until some sequence has had finite ones. If none
    has, nothing is recorded: the target itself is broken.
    """

    def __init__(self) -> None:
        self._held: list[Sequence] = []
        self._has_seen_finite = False

    def note_finite(self) -> None:
        """A sequence had finite logits."""
        self._has_seen_finite = True

    def filter(self, finished: list[Sequence], *, is_end: bool = False) -> list[Sequence]:
        """Those of these sequences, and of those held back before, that may be recorded now: all of them at
        the end of all requests.

        Raises :class:`UserError` if ``NUM_SUSPECT_ROWS`` are held back.
        """
        held = [sequence for sequence in finished if sequence.has_nonfinite_logits]
        if self._has_seen_finite or is_end:
            recordable, self._held = self._held + finished, []
            return recordable
        self._held += held
        if len(self._held) >= NUM_SUSPECT_ROWS:
            raise UserError(
                f"the target's logits are not finite (NaN or infinite) in all of the first {len(self._held)} "
                "rows: its checkpoint is damaged, or its numbers are too large for this --dtype. Nothing was "
                "written down for these rows. Use --dtype float32 (with another --output), or get the "
                "checkpoint's files again"
            )
        return [sequence for sequence in finished if not sequence.has_nonfinite_logits]
