"""Kept states against a model of slots: each sequence begins with that of its own first tokens, and what is
kept is of as many tokens as it is found for."""

import random
from collections.abc import Iterator

from specdist.engine.request import Request
from specdist.engine.schedule.plan import RoundPlan, SchedulerSettings
from specdist.engine.schedule.scheduler import Scheduler
from specdist.models.cache.pages import PageTable

PAGE_SIZE, NUM_STATES = 4, 2


def scheduler(
    requests: Iterator[Request], *, num_pages: int = 200, num_states: int = NUM_STATES
) -> Scheduler:
    settings = SchedulerSettings(
        max_num_seqs=6, max_num_batched_tokens=40, max_draft_tokens=0, max_new_tokens=30, max_seq_len=64,
        seed=0, target_keeps_states=True,
    )  # fmt: skip
    pages = PageTable(
        num_pages=num_pages, page_size=PAGE_SIZE, num_slots=settings.num_slots, num_prefix_states=num_states
    )
    return Scheduler(settings, pages, requests)


def samples(prompts: list[list[int]], num_samples: int) -> Iterator[Request]:
    for row, prompt in enumerate(prompts):
        for sample in range(num_samples):
            yield Request(row_id=row, sample_index=sample, prompt_ids=prompt)


class Slots:
    """Which tokens the states and the pages are of, told by the plans alone."""

    def __init__(self, num_slots: int = 6) -> None:
        self.states: list[list[int]] = [[] for _ in range(num_slots)]
        self.kept: dict[int, list[int]] = {}
        self.table: dict[tuple[int, int], int] = {}
        self.pages: dict[int, list[int]] = {}
        self.num_run = 0

    def run(self, plan: RoundPlan) -> None:
        updates, to_keep = plan.page_updates, []
        for slot, index, page in zip(
            updates.slots.tolist(), updates.indices.tolist(), updates.pages.tolist(), strict=True
        ):
            if slot >= 0:
                self.table[slot, index] = page
            elif index:
                to_keep.append((-1 - slot, index, page))
            else:
                self.states[-1 - slot] = self.kept[page]
        for chunk in plan.chunks:
            tokens, slot = chunk.sequence.token_ids, chunk.sequence.slot
            if chunk.begin == 0:
                self.states[slot] = []
            self.write(slot, chunk.begin, tokens[: chunk.end])
            self.num_run += chunk.end - chunk.begin
        for sequence in plan.decoding:
            self.write(sequence.slot, len(sequence.token_ids), [*sequence.token_ids, 7])
            sequence.begin_block(7, 0, missed=False)
            sequence.end_block([], 0)
        for slot, length, number in to_keep:
            self.kept[number] = self.states[slot]
            assert len(self.states[slot]) == length

    def write(self, slot: int, begin: int, tokens: list[int]) -> None:
        """A pass from ``begin`` on, which reads what is before it."""
        assert self.states[slot] == tokens[:begin]
        for first in range(0, begin, PAGE_SIZE):
            end = min(begin, first + PAGE_SIZE)
            assert self.pages[self.table[slot, first // PAGE_SIZE]][: end - first] == tokens[first:end]
        for place in range(begin, len(tokens)):
            page, offset = self.table[slot, place // PAGE_SIZE], place % PAGE_SIZE
            self.pages[page] = [*self.pages.get(page, [])[:offset], tokens[place]]
        self.states[slot] = tokens


def test_random_prompts_begin_with_the_states_of_their_prefixes() -> None:
    """They are preempted, and states and pages are evicted."""
    rng = random.Random(3)
    roots = [[rng.randrange(9) for _ in range(30)] for _ in range(4)]
    prompts = [[*rng.choice(roots)[: rng.randrange(30)], rng.randrange(9)] for _ in range(150)]
    rounds, slots = scheduler(samples(prompts, 2), num_pages=24), Slots()
    num_ended = num_preempted = num_shared = 0
    while not (plan := rounds.plan()).is_empty:
        slots.run(plan)
        num_preempted += len(plan.suspended_slots)
        num_shared += sum(sequence.num_shared for sequence in plan.opened)
        for sequence in list(plan.decoding):
            if len(sequence.token_ids) >= sequence.max_length or rng.random() < 0.03:
                rounds.finish(sequence)
                num_ended += 1
    assert num_ended == 300 and num_preempted > 10 and num_shared > 1500, (num_preempted, num_shared)


def num_run(prompts: list[list[int]], num_samples: int, num_states: int = NUM_STATES) -> int:
    """Tokens of prompts that are run, if nothing ends."""
    rounds, slots = scheduler(samples(prompts, num_samples), num_states=num_states), Slots()
    for _ in range(4):
        slots.run(rounds.plan())
    return slots.num_run


def test_samples_run_their_prompt_once() -> None:
    first, second = [1] * 19, [2] * 30
    assert num_run([first, second], 3) == 16 + 3 * 3 + 28 + 3 * 2
    # With room for one state, the second prompt waits.
    assert num_run([first, second], 3, num_states=1) == 16 + 3 * 3 + 28 + 3 * 2
    # And what is in no other prompt is not cut.
    rounds = scheduler(samples([first, second], 1))
    assert [(chunk.begin, chunk.end) for chunk in rounds.plan().chunks] == [(0, 19), (0, 21)]


def test_prompts_with_a_common_beginning_run_it_once() -> None:
    common = list(range(18))
    prompts = [[*common, *[row] * 9] for row in range(20, 24)]
    # The first has 16 of it in common with the next one, and no more.
    assert num_run(prompts, 1) == 16 + 4 * (2 + 9)
    # Where it is not the next one, the second that has it keeps its state.
    assert num_run([prompts[0], [9], *prompts[1:]], 1) == 2 * 16 + 4 * (2 + 9) + 1


def test_a_state_goes_with_its_page() -> None:
    pages = PageTable(num_pages=8, page_size=PAGE_SIZE, num_slots=2, num_prefix_states=NUM_STATES)
    context = list(range(9))
    for slot in range(2):
        assert pages.open(slot, context) == 0
        assert pages.states.may_begin(slot, 9 // PAGE_SIZE) is not bool(slot)
        if slot:
            pages.close(slot)  # it waits
    assert pages.extend(0, 9) and pages.chunk_end(0, 9) == 8
    pages.publish(0, 8)
    pages.drain_updates()
    pages.close(0)
    assert pages.open(0, context) == 8
    pages.close(0)
    pages.open(1, [5])
    assert pages.extend(1, 32)  # all pages
    pages.close(1)
    assert pages.open(0, context) == 0
    # Both places are free again.
    assert pages.extend(0, 9) and pages.states.may_begin(0, 9 // PAGE_SIZE)
    assert not pages.drain_updates().slots.min() < 0
