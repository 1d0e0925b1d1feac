"""Which tokens run in the next pass: continuous batching over the free pages. No tensors.

A sequence that finishes frees its slot and pages, and the next request is admitted in the following round;
prompts are prefilled in chunks under the pass's token budget. When the pages run out, the youngest sequence
is preempted: it waits, is prefilled again, and continues where its last block began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from specdist.cache.pages import PageTable, PageUpdates
from specdist.engine.sequence import Request, Sequence
from specdist.sampling.keys import stream_key


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Limits of a batch, in sequences and tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_tokens: int
    num_ahead_tokens: int = 0
    max_new_tokens: int
    max_seq_len: int
    seed: int

    @property
    def num_slots(self) -> int:
        """Sequences in flight. Each must always get its whole block into a pass, or the lengths of its
        blocks, and with them its tokens, would depend on the other sequences."""
        return max(1, min(self.max_num_seqs, self.max_num_batched_tokens // (self.max_draft_tokens + 1)))

    def halved(self) -> SchedulerSettings:
        """Half the sequences and tokens, but at least one sequence and its block."""
        return replace(
            self,
            max_num_seqs=max(1, self.num_slots // 2),
            max_num_batched_tokens=max(self.max_draft_tokens + 1, self.max_num_batched_tokens // 2),
        )

    @property
    def is_smallest(self) -> bool:
        """One sequence at a time, and one block of it."""
        return self.num_slots == 1 and self.max_num_batched_tokens == self.max_draft_tokens + 1


@dataclass(frozen=True)
class Chunk:
    """Context tokens ``begin .. end - 1`` of a sequence, to be prefilled in this pass."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def completes_context(self) -> bool:
        return self.end == self.sequence.context_length


@dataclass(frozen=True)
class RoundPlan:
    """One round: the sequences that decode, the most candidates of each, and the prompt chunks beside them.

    ``opened``: sequences that were just admitted. ``suspended_slots``: slots of those just preempted.
    """

    decoding: list[Sequence]
    draft_limits: list[int]
    chunks: list[Chunk]
    opened: list[Sequence]
    suspended_slots: list[int]
    page_updates: PageUpdates

    @property
    def is_empty(self) -> bool:
        return not self.decoding and not self.chunks

    @property
    def num_preempted(self) -> int:
        return len(self.suspended_slots)


class Scheduler:
    """Holds the waiting and the running sequences, in admission order."""

    def __init__(
        self,
        settings: SchedulerSettings,
        pages: PageTable,
        requests: Iterator[Request],
        *,
        on_resize: Callable[[SchedulerSettings], None] | None = None,
    ) -> None:
        """``on_resize``: called with new limits, which later schedulers should start with."""
        self.settings = settings
        self._on_resize = on_resize
        # By order: the limits under which each of these sequences first ran out of memory.
        self._limits_before: dict[int, SchedulerSettings] = {}
        self._pages = pages
        self._requests = requests
        self._waiting: deque[Sequence] = deque()
        self._free_slots = list(range(settings.num_slots - 1, -1, -1))
        self._num_admitted = 0
        self.running: list[Sequence] = []

    @property
    def num_free_pages(self) -> int:
        """Pages that can be handed out now."""
        return self._pages.num_available

    def plan(self) -> RoundPlan:
        """The next round. Empty when every request is finished."""
        limits, suspended_slots = self._reserve_blocks()
        decoding = [sequence for sequence in self.running if not sequence.is_prefilling]
        budget = self.settings.max_num_batched_tokens - sum(
            limits[sequence.order] + 1 for sequence in decoding
        )
        chunks: list[Chunk] = []
        for sequence in self.running:
            if sequence.is_prefilling and budget > 0:
                chunks.append(self._next_chunk(sequence, budget))
                budget -= chunks[-1].end - chunks[-1].begin
        opened: list[Sequence] = []
        while budget > 0 and self._free_slots and (candidate := self._next_waiting()) is not None:
            if not self._open(candidate):
                self._waiting.appendleft(candidate)
                break
            opened.append(candidate)
            chunks.append(self._next_chunk(candidate, budget))
            budget -= chunks[-1].end - chunks[-1].begin
        return RoundPlan(
            decoding=decoding,
            draft_limits=[limits[sequence.order] for sequence in decoding],
            chunks=chunks,
            opened=opened,
            suspended_slots=suspended_slots,
            page_updates=self._pages.drain_updates(),
        )

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and pages of a sequence that has ended."""
        self._limits_before.pop(sequence.order, None)
        self._give_back(sequence)
        self.running.remove(sequence)

    @property
    def lone_row(self) -> tuple[int, int] | None:
        """Row and sample of the sequence that runs alone in the smallest batch; None if none does."""
        if not self.settings.is_smallest or not self.running:
            return None
        return self.running[0].request.row_id, self.running[0].request.sample_index

    def shrink(self) -> Sequence | None:
        """A round has failed for lack of memory: preempt all sequences, and halve the batch.

        If a sequence was alone in the smallest batch, it is taken out and returned, since it cannot run at
        all; the batch is then as large as before that sequence first ran out of memory.
        """
        too_long: Sequence | None = None
        for sequence in self.running:
            self._limits_before.setdefault(sequence.order, self.settings)
        if self.lone_row is not None:
            too_long = self.running[0]
            self.settings = self._limits_before[too_long.order]
            self.finish(too_long)
        else:
            self.settings = self.settings.halved()
        while self.running:
            self._preempt(self.running[-1])
        self._pages.forget_contents()
        self._free_slots = list(range(self.settings.num_slots - 1, -1, -1))
        if self._on_resize is not None:
            self._on_resize(self.settings)
        return too_long

    def _reserve_blocks(self) -> tuple[dict[int, int], list[int]]:
        """Reserve pages for every decoding sequence's next block.

        Returns the most candidates of each (by order), and the slots of the sequences preempted for it.
        """
        limits: dict[int, int] = {}
        suspended_slots: list[int] = []
        for sequence in list(self.running):
            if sequence.slot < 0 or sequence.is_prefilling:
                continue
            length = len(sequence.token_ids)
            # One more token always follows the accepted candidates.
            limit = min(self.settings.max_draft_tokens, sequence.max_length - length - 2)
            limits[sequence.order] = max(0, limit)
            reach = min(length + 1 + max(0, limit) + self.settings.num_ahead_tokens, sequence.max_length)
            while sequence.slot >= 0 and not self._pages.extend(sequence.slot, reach):
                suspended_slots.append(self.running[-1].slot)
                self._preempt(self.running[-1])
        return limits, suspended_slots

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.rewind()
        self._waiting.appendleft(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._pages.close(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _next_waiting(self) -> Sequence | None:
        if self._waiting:
            return self._waiting.popleft()
        request = next(self._requests, None)
        if request is None:
            return None
        self._num_admitted += 1
        length = len(request.prompt_ids)
        limit = self.settings.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        return Sequence(
            request=request,
            order=self._num_admitted,
            stream_key=stream_key(self.settings.seed, request.row_id, request.sample_index),
            max_length=min(length + limit, self.settings.max_seq_len),
            token_ids=list(request.prompt_ids),
        )

    def _open(self, sequence: Sequence) -> bool:
        """Admit the sequence if its context fits and, if others run, a block of each fits beside it."""
        slot = self._free_slots[-1]
        num_shared = self._pages.open(slot, sequence.token_ids)
        reach = self.settings.max_draft_tokens + 1 + self.settings.num_ahead_tokens
        spare = (len(self.running) + 1) * (self._pages.num_pages_for(reach) + 1) if self.running else 0
        length = min(len(sequence.token_ids) + self.settings.num_ahead_tokens, sequence.max_length)
        missing = self._pages.num_pages_for(length) - num_shared // self._pages.page_size
        if missing + spare > self._pages.num_available or not self._pages.extend(slot, length):
            self._pages.close(slot)
            return False
        self._free_slots.pop()
        sequence.admit(slot, num_shared)
        self.running.append(sequence)
        return True

    def _next_chunk(self, sequence: Sequence, budget: int) -> Chunk:
        begin = sequence.num_prefilled
        end = min(sequence.context_length, begin + budget)
        sequence.num_prefilled = end
        self._pages.publish(sequence.slot, end)
        return Chunk(sequence, begin, end)
