"""The scheduler without a model: what is run, in what order, within which limits."""

from specdist.engine.request import Request
from specdist.engine.schedule.plan import RoundPlan, SchedulerSettings
from specdist.engine.schedule.scheduler import Scheduler
from specdist.models.cache.pages import PageTable

PAGE_SIZE = 4


def scheduler(
    prompt_lengths: list[int],
    *,
    num_pages: int = 100,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_draft_tokens: int = 3,
    max_new_tokens: int = 10,
    max_seq_len: int = 64,
    shares_room: bool = False,
) -> Scheduler:
    settings = SchedulerSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_draft_tokens=max_draft_tokens,
        max_new_tokens=max_new_tokens,
        max_seq_len=max_seq_len,
        seed=0,
        shares_room=shares_room,
    )
    pages = PageTable(num_pages=num_pages, page_size=PAGE_SIZE, num_slots=settings.num_slots)
    requests = (
        Request(row_id=row, sample_index=0, prompt_ids=[row] * length)
        for row, length in enumerate(prompt_lengths)
    )
    return Scheduler(settings, pages, requests)


def run_round(plan: RoundPlan, num_accepted: int = 0) -> None:
    """Update the sequences as the engine does in a round in which every row continues."""
    for sequence, limit in zip(plan.decoding, plan.draft_limits, strict=True):
        sequence.begin_block(7, limit, missed=False)
        sequence.end_block([7] * min(num_accepted, limit), limit)


def test_prompts_are_cut_into_chunks_within_the_token_budget() -> None:
    rounds = scheduler([20, 30, 5])
    sizes = []
    for _ in range(3):
        plan = rounds.plan()
        sizes.append([(chunk.sequence.request.row_id, chunk.begin, chunk.end) for chunk in plan.chunks])
        run_round(plan)
    # The second round has room for 4 tokens less: row 0 decodes while row 1 is prefilled.
    assert sizes == [[(0, 0, 20), (1, 0, 12)], [(1, 12, 30), (2, 0, 5)], []]


def test_no_pass_exceeds_its_budget_and_every_row_gets_its_whole_block() -> None:
    rounds = scheduler([3, 9, 17, 40, 2, 8, 25, 31], max_num_batched_tokens=20, max_new_tokens=12)
    assert rounds.settings.num_slots == 5
    finished = 0
    while not (plan := rounds.plan()).is_empty:
        tokens = sum(limit + 1 for limit in plan.draft_limits)
        tokens += sum(chunk.end - chunk.begin for chunk in plan.chunks)
        assert 0 < tokens <= 20
        for sequence, limit in zip(plan.decoding, plan.draft_limits, strict=True):
            assert limit == max(0, min(3, sequence.max_length - len(sequence.token_ids) - 2))
        run_round(plan, num_accepted=2)
        for sequence in list(plan.decoding):
            if len(sequence.token_ids) >= sequence.max_length:
                rounds.finish(sequence)
                finished += 1
    assert finished == 8


def test_a_finished_row_makes_room_in_the_same_round() -> None:
    rounds = scheduler([4, 4, 4], max_num_seqs=2)
    plan = rounds.plan()
    assert [sequence.request.row_id for sequence in plan.opened] == [0, 1]
    run_round(plan)
    rounds.finish(rounds.running[0])
    plan = rounds.plan()
    assert [sequence.request.row_id for sequence in plan.opened] == [2]
    assert [sequence.request.row_id for sequence in plan.decoding] == [1]


def test_the_youngest_sequence_is_preempted_and_later_repeats_its_block() -> None:
    rounds = scheduler([8, 8], num_pages=8, max_draft_tokens=3, max_new_tokens=20, max_num_batched_tokens=64)
    plans = [rounds.plan()]
    while not plans[-1].suspended_slots:
        run_round(plans[-1], num_accepted=3)
        plans.append(rounds.plan())
    [old] = plans[-1].decoding
    assert old.request.row_id == 0
    [young] = [s for s in plans[-2].decoding if s.request.row_id == 1]
    # Back at the beginning of its last block: the next token is known, the candidates are forgotten.
    assert young.slot == -1 and young.forced_next_token == 7
    misses = young.counters.num_misses
    length = len(young.token_ids)
    rounds.finish(old)
    plan = rounds.plan()
    assert plan.opened == [young] and plan.chunks[0].end == length
    plan = rounds.plan()
    assert plan.decoding == [young] and young.counters.num_misses == misses


def test_admission_leaves_room_for_the_rows_that_run() -> None:
    """A row admitted into the last pages would be thrown out in the next round."""
    rounds = scheduler([8, 8, 8], num_pages=7)
    assert len(rounds.plan().opened) == 1


def test_the_longest_row_fits_the_page_table() -> None:
    rounds = scheduler([60], max_new_tokens=50, max_seq_len=64, max_num_batched_tokens=64)
    run_round(rounds.plan())
    for _ in range(3):
        plan = rounds.plan()
        if not plan.decoding:
            break
        [sequence] = plan.decoding
        assert len(sequence.token_ids) + 1 + plan.draft_limits[0] <= 64
        run_round(plan)
