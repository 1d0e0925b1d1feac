"""Which tokens run in the next pass: continuous batching over the free pages. No tensors.

A sequence that finishes frees its slot and pages, and the next request is admitted in the following round;
prompts are prefilled in chunks under the pass's token budget. When the pages run out, the youngest sequence
is preempted: it waits, is prefilled again, and continues where its last block began.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from specdist.engine.request import Request, Requests, Sequence
from specdist.engine.schedule.plan import (
    DRAW,
    Chunk,
    LastPass,
    RoundPlan,
    SchedulerSettings,
    candidates_within,
    limits_within,
)
from specdist.engine.schedule.stopping import StopRules
from specdist.models.cache.pages import NO_UPDATES, PageTable, PageUpdates
from specdist.sampling.keys import stream_key


class Scheduler:
    """Holds the waiting and the running sequences, in admission order."""

    def __init__(
        self,
        settings: SchedulerSettings,
        pages: PageTable,
        requests: Requests,
        *,
        scores_prompts: bool = False,
    ) -> None:
        self.settings = settings
        self._scores_prompts = scores_prompts
        self._pages = pages
        self._requests = requests
        self.waiting: deque[Sequence] = deque()
        self._free_slots = list(range(settings.num_slots - 1, -1, -1))
        self._num_admitted = 0
        self.running: list[Sequence] = []

    @property
    def lone_row(self) -> tuple[int, int] | None:
        """Row and sample of the sequence that runs alone in the smallest batch; None if none does."""
        if not self.settings.is_smallest or not self.running:
            return None
        request = self.running[0].request
        return request.row_id, request.sample_index

    def updates_of_draft(self, updates: PageUpdates) -> PageUpdates:
        """The updates of pages that a draft's cache has, too; kept states are the target's."""
        if self._pages.windowed is None and self._pages.states is None:
            return updates
        return updates.where((updates.pages >= 0) & (updates.slots >= 0))

    def plan(self, known: tuple[list[Sequence], list[int], PageUpdates] | None = None) -> RoundPlan:
        """The next round. Empty when every request is finished. ``known``: the running sequences, whose
        contexts are complete, the most candidates of each, and the updates that gave all of them pages."""
        prefilling: list[Sequence] = []
        if known is None:
            limits, suspended_slots = self._reserve_blocks()
            decoding = [sequence for sequence in self.running if not sequence.is_prefilling]
            prefilling = [sequence for sequence in self.running if sequence.is_prefilling]
            draft_limits, updates = [limits[sequence.order] for sequence in decoding], NO_UPDATES
        else:
            (decoding, draft_limits, updates), suspended_slots = known, []
        budget = self.settings.max_num_batched_tokens - sum(draft_limits) - len(decoding)
        chunks: list[Chunk] = []
        opened: list[Sequence] = []
        held: list[Sequence] = []
        while budget > 0:
            if prefilling:
                sequence = prefilling.pop(0)
            elif (candidate := self._admit(held)) is not None:
                sequence = candidate
                opened.append(candidate)
            else:
                break
            chunks.append(self._next_chunk(sequence, budget))
            budget -= chunks[-1].end - chunks[-1].begin
        self.waiting.extendleft(reversed(held))
        return RoundPlan(
            decoding=decoding,
            draft_limits=draft_limits,
            chunks=chunks,
            opened=opened,
            suspended_slots=suspended_slots,
            page_updates=PageUpdates.joined([updates, self._pages.drain_updates()]),
        )

    def look_ahead(self, num_wanted: int = 1) -> None:
        """Ask for the next requests until so many wait, so that free slots need not wait for them."""
        while len(self.waiting) < num_wanted and (request := next(self._requests, None)) is not None:
            self.waiting.append(self._new_sequence(request))

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and pages of a sequence that has ended."""
        self._give_back(sequence)
        self.running.remove(sequence)

    def _reserve_blocks(self) -> tuple[dict[int, int], list[int]]:
        """Reserve pages for every decoding sequence's next block.

        Returns the most candidates of each (by order), and the slots of the sequences preempted for it.
        """
        limits, suspended_slots = dict[int, int](), list[int]()
        for sequence in list(filter(self.must_recompute, reversed(self.running))):
            suspended_slots.append(sequence.slot)
            self._preempt(sequence, keeps_block=True)
        most = self.most_candidates
        for sequence in list(self.running):
            if sequence.slot < 0 or sequence.is_prefilling:
                continue
            length = len(sequence.token_ids)
            limits[sequence.order] = candidates_within(most, self.room(sequence))
            reach = self._reach(sequence, length, most)
            while sequence.slot >= 0 and not self._reserve(sequence, reach):
                suspended_slots.append(self.running[-1].slot)
                self._preempt(self.running[-1])
        return limits, suspended_slots

    def room(self, sequence: Sequence) -> int:
        """Tokens that may follow before the sequence ends, or is run anew: no block crosses the border."""
        end, border = sequence.max_length, self.settings.recomputed_from
        if border is not None and sequence.context_length <= border:
            end = min(end, border + 1)
        return end - len(sequence.token_ids)

    def must_recompute(self, sequence: Sequence) -> bool:
        """Whether the sequence has become longer than the border since it was admitted."""
        border = self.settings.recomputed_from
        return border is not None and sequence.context_length <= border < len(sequence.token_ids)

    @property
    def most_candidates(self) -> int:
        """The most candidates of a sequence in a pass, with as many sequences as run now."""
        return self.settings.most_candidates(max(1, len(self.running)))

    def _reach(self, sequence: Sequence, length: int, most: int) -> int:
        """Tokens that need pages when the next block follows so many tokens."""
        limit = candidates_within(most, sequence.max_length - length)
        return min(length + 1 + limit + self.settings.num_ahead_tokens, sequence.max_length)

    def _reserve(self, sequence: Sequence, reach: int) -> bool:
        if reach > sequence.num_reserved:
            if not self._pages.extend(sequence.slot, reach):
                return False
            sequence.num_reserved = self._pages.num_pages_for(reach) * self._pages.page_size
            self._pages.slide(sequence.slot, len(sequence.token_ids), reach)
        return True

    def reserve_early(self, num_candidates: list[int]) -> PageUpdates | None:
        """Pages for the blocks after a pass over so many candidates of each running sequence, however many
        are accepted. None where pages are few."""
        block = self._pages.num_pages_for(1 + self.settings.max_draft_tokens + self.settings.num_ahead_tokens)
        if self._pages.num_available < 2 * len(self.running) * (block + 1):
            return None
        most = self.most_candidates
        for sequence, num_more in zip(self.running, num_candidates, strict=True):
            self._reserve(sequence, self._reach(sequence, len(sequence.token_ids) + num_more, most))
        return self._pages.drain_updates()

    def _preempt(self, sequence: Sequence, *, keeps_block: bool = False) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.rewind(keeps_block=keeps_block)
        self.waiting.appendleft(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._pages.close(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _admit(self, held: list[Sequence]) -> Sequence | None:
        """Open the next sequence, if its context fits and, if others run, a block of each fits beside it.
        Sequences that wait for a state of their prefix are put aside, into ``held``."""
        states = self._pages.states
        while len(self._free_slots) > len(held):
            self.look_ahead()
            if not self.waiting:
                return None
            sequence, slot = self.waiting.popleft(), self._free_slots[-1]
            token_ids, is_anew = sequence.token_ids, self.settings.recomputed_from is not None
            num_shared = self._pages.open(
                slot,
                token_ids,
                is_shared=not sequence.runs_whole_prompt,
                rope_length=len(token_ids) if is_anew else sequence.num_prompt_tokens,
            )
            may_begin = states is None or states.may_begin(slot, self._num_common(token_ids))
            if may_begin and self._reserve_context(sequence, slot, num_shared):
                self._free_slots.pop()
                self.running.append(sequence)
                sequence.admit(slot, num_shared)
                return sequence
            self._pages.close(slot)
            if may_begin:
                self.waiting.appendleft(sequence)
                return None
            held.append(sequence)
        return None

    def _num_common(self, token_ids: list[int]) -> int:
        """Full pages of first tokens that the sequence after this one can share with it."""
        self.look_ahead()
        if not self.waiting or self.waiting[0].runs_whole_prompt:
            return 0
        pairs = zip(token_ids, self.waiting[0].token_ids[:-1], strict=False)
        num_tokens = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return num_tokens // self._pages.page_size

    def _reserve_context(self, sequence: Sequence, slot: int, num_shared: int) -> bool:
        reach = self.settings.max_draft_tokens + 1 + self.settings.num_ahead_tokens
        spare = (len(self.running) + 1) * (self._pages.num_pages_for(reach) + 1) if self.running else 0
        length = min(len(sequence.token_ids) + self.settings.num_ahead_tokens, sequence.max_length)
        missing = self._pages.num_pages_for(length) - num_shared // self._pages.page_size
        has_room = missing + spare <= self._pages.num_available
        has_room = has_room and (self._pages.states is None or self._pages.states.has_room)
        return has_room and self._pages.extend(slot, length)

    def _new_sequence(self, request: Request) -> Sequence:
        self._num_admitted += 1
        limit = self.settings.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        seed = self.settings.seed if request.seed is None else request.seed
        return Sequence(
            request=request,
            order=self._num_admitted,
            stream_key=stream_key(
                seed, request.row_id, request.sample_index, len(request.earlier), request.attempt
            ),
            max_length=min(len(request.prompt_ids) + limit, self.settings.max_seq_len),
            token_ids=list(request.prompt_ids),
            runs_whole_prompt=self._scores_prompts and len(request.prompt_ids) > 1,
        )

    def _next_chunk(self, sequence: Sequence, budget: int) -> Chunk:
        begin = sequence.num_prefilled
        end = self._pages.chunk_end(sequence.slot, min(sequence.context_length, begin + budget))
        sequence.num_prefilled = end
        self._pages.slide(sequence.slot, begin, end)
        self._pages.publish(sequence.slot, end)
        return Chunk(sequence, begin, end)


@dataclass(frozen=True)
class NextRound:
    """A round of the sequences that run now, known while the pass before it is under way.

    In most rounds few sequences end and few begin: the next round has the others, and what the pass accepts
    only decides how long they are. So its request can be sent before the accepted candidates are committed,
    but for those of the sequences that they end.

    Attributes:
        sequences: those of that pass's blocks, then those that the pass begins, whose first token this
            round's is.
        candidates: ids, block by block; ``doubtful``: blocks whose candidates may end their sequences.
        last: of the pass, as if it accepted nothing.
        room_R: tokens that each completion has room for.
        most_candidates: of a sequence, as many as pages are reserved for.
    """

    scheduler: Scheduler
    stop_rules: StopRules
    sequences: list[Sequence]
    candidates: list[list[int]]
    doubtful: list[int]
    last: LastPass
    room_R: np.ndarray
    most_candidates: int
    page_updates: PageUpdates

    @staticmethod
    def foresee(
        scheduler: Scheduler,
        stop_rules: StopRules,
        blocks: Iterable[tuple[Sequence, list[int]]],
        plan: RoundPlan,
    ) -> NextRound | None:
        """Foresee the next round when all next tokens are committed; ``blocks``: sequences of the pass, with
        their candidates. None if a context goes on after the pass, or if pages are few."""
        running, new = list(scheduler.running), [chunk.sequence for chunk in plan.chunks]
        sequences, candidates = [each for each, _ in blocks], [ids for _, ids in blocks]
        if (
            not running
            or running != sequences + new
            or any(sequence.is_prefilling or sequence.forced_next_token is not None for sequence in new)
            or any(map(scheduler.must_recompute, running))
        ):
            return None
        page_updates = scheduler.reserve_early([len(ids) for ids in candidates] + [0] * len(new))
        if page_updates is None:
            return None
        nothing_R = np.zeros(len(running), np.int64)
        slots_R = np.array([sequence.slot for sequence in running], np.int64)
        return NextRound(
            scheduler=scheduler,
            stop_rules=stop_rules,
            sequences=running,
            candidates=candidates,
            doubtful=[
                index
                for index, (sequence, ids) in enumerate(zip(sequences, candidates, strict=True))
                if stop_rules.may_end(sequence, ids)
            ],
            last=LastPass(slots_R, nothing_R, nothing_R, np.full(len(running), DRAW)),
            room_R=np.array([scheduler.room(sequence) for sequence in running], np.int64),
            most_candidates=scheduler.most_candidates,
            page_updates=page_updates,
        )

    def ended(self, num_accepted_R: np.ndarray) -> list[int]:
        """The blocks whose accepted candidates end their sequences."""
        accepted = ((index, self.candidates[index][: num_accepted_R[index]]) for index in self.doubtful)
        return [
            index
            for index, token_ids in accepted
            if self.stop_rules.check(self.sequences[index], token_ids).reason is not None
        ]

    def after(self, num_accepted_R: np.ndarray, ended: list[int]) -> tuple[RoundPlan, LastPass]:
        """The round, once it is known how many candidates of each block are accepted, and those that have
        ``ended`` have left the scheduler."""
        num_new = len(self.sequences) - len(num_accepted_R)
        if num_new:
            num_accepted_R = np.concatenate([num_accepted_R, np.zeros(num_new, np.int64)])
        sequences, room_R, updates = self.sequences, self.room_R, self.page_updates
        last = self.last._replace(num_accepted_R=num_accepted_R)
        if ended:
            goes_on_R = np.ones(len(sequences), bool)
            goes_on_R[ended] = False
            updates = updates.without(last.slots_R[ended])
            sequences = [sequences[index] for index in np.flatnonzero(goes_on_R)]
            room_R, last = room_R[goes_on_R], LastPass(*(column_R[goes_on_R] for column_R in last))
        limits = limits_within(self.most_candidates, room_R - last.num_accepted_R)
        return self.scheduler.plan((sequences, limits, updates)), last
