"""Logits that are not finite, and rows that end with an error: other sequences are not changed.

Where memory runs out, the replica starts over with a smaller batch: see :mod:`specdist.job.ranks.restart`.
"""

from __future__ import annotations

from specdist.engine.request import Sequence
from specdist.sampling.processing.processors import TokenMasker
from specdist.utils.errors import UserError

# If this many sequences have non-finite logits and none has finite ones, the model is at fault.
NUM_SUSPECT_ROWS = 8


def mark_without_token(sequence: Sequence, masker: TokenMasker | None) -> None:
    """It ends with an error, without a next token, for which its constraint or the logits are to blame.

    A prompt's first token has position 0. ``masker``: the target's.
    """
    place = f"position {len(sequence.token_ids)} (of prompt and completion)"
    failure = None if masker is None else masker.failure(sequence.slot)
    if failure is None:
        sequence.has_nonfinite_logits = True
        sequence.error = f"the target's logits for the token at {place} are not finite: NaN or infinite"
    else:
        sequence.error = (
            f"the row's constraint allows no token at {place}, since llguidance has given up: {failure}"
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
        """The sequences, of these and of those held back before, that may be recorded now: all of them at
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
