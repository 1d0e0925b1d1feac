"""Failures of a round: lack of memory, and logits that are not finite.

Neither changes other sequences. A round that runs out of memory is repeated with a smaller batch: a sequence
that has begun a block repeats it with the same random numbers, as after any preemption.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from specdist.engine.messages.failures import DraftOutOfMemory, is_out_of_memory
from specdist.engine.messages.interfaces import Target
from specdist.engine.request import Sequence
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.plan import RoundPlan, SchedulerSettings
from specdist.engine.schedule.scheduler import Scheduler
from specdist.models.loading.memory import release_memory
from specdist.sampling.processing.processors import TokenMasker
from specdist.utils.errors import UserError, first_line

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


logger = logging.getLogger(__name__)


class MemoryGuard:
    """Prepares a smaller round where memory runs out.

    ``suspended_slots``: of sequences that were preempted since the draft's last reply.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        target: Target,
        stats_recorder: StatsRecorder,
        *,
        on_resize: Callable[[SchedulerSettings], None] | None,
        on_lone_row: Callable[[tuple[int, int] | None], None] | None,
    ) -> None:
        """
        Args:
            on_resize: called with new limits of the batch, which later engines should start with.
            on_lone_row: called before every round with the row and sample that runs alone in the smallest
                batch, or None; lets a restart know which row a crash was about.
        """
        self._scheduler = scheduler
        self._target = target
        self._stats_recorder = stats_recorder
        self._on_resize = on_resize
        self._on_lone_row = on_lone_row
        self.suspended_slots: list[int] = []
        self._has_reply = False
        # The limits under which each sequence first ran out of memory, by order of admission.
        self._limits_before: dict[int, SchedulerSettings] = {}

    def note_reply(self) -> None:
        """The draft has replied in this round."""
        self._has_reply, self.suspended_slots = True, []

    def begin_round(self) -> None:
        """A round begins."""
        self._has_reply = False
        if self._on_lone_row is not None:
            self._on_lone_row(self._lone_row)

    def reason(self, error: RuntimeError | MemoryError) -> str:
        """What the round's error says. Raises it if a smaller batch does not help."""
        # A rank that takes part in a collective pass cannot leave it alone.
        if not is_out_of_memory(error) or not (
            self._target.is_single_rank or isinstance(error, DraftOutOfMemory)
        ):
            raise error
        return first_line(error)

    def make_smaller(self, plan: RoundPlan, message: str) -> Sequence | None:
        """Prepare to repeat the round. Returns a sequence that cannot run at all, if there is one, with its
        error. To be called when the error is gone, and with it the tensors of the round."""
        release_memory(self._target.device)
        self._stats_recorder.record_out_of_memory(plan)
        running = self._scheduler.running
        if self._has_reply:
            self.suspended_slots = [sequence.slot for sequence in running]
        else:
            self.suspended_slots += plan.suspended_slots
            self.suspended_slots += [sequence.slot for sequence in running if sequence not in plan.opened]
        too_long = self._shrink()
        outcome = ""
        if too_long is not None:
            too_long.error = too_large(message)
            outcome = f"; row {too_long.request.row_id} does not fit alone; recorded as error"
        settings = self._scheduler.settings
        logger.warning(
            "out of memory (%s)%s: from here on at most %d sequences and %d tokens at a time",
            message,
            outcome,
            settings.num_slots,
            settings.max_num_batched_tokens,
        )
        return too_long

    @property
    def _lone_row(self) -> tuple[int, int] | None:
        """Row and sample of the sequence that runs alone in the smallest batch; None if none does."""
        settings, running = self._scheduler.settings, self._scheduler.running
        if not settings.is_smallest or not running:
            return None
        return running[0].request.row_id, running[0].request.sample_index

    def _shrink(self) -> Sequence | None:
        """Preempt all sequences, and halve the batch.

        If a sequence was alone in the smallest batch, it is taken out and returned, since it cannot run at
        all; the batch is then as large as before that sequence first ran out of memory.
        """
        scheduler, too_long = self._scheduler, None
        for sequence in scheduler.running:
            self._limits_before.setdefault(sequence.order, scheduler.settings)
        if self._lone_row is None:
            settings = scheduler.settings.halved()
        else:
            too_long = scheduler.running[0]
            settings = self._limits_before[too_long.order]
            scheduler.finish(too_long)
        scheduler.restart(settings)
        if self._on_resize is not None:
            self._on_resize(settings)
        return too_long
