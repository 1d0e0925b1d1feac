"""Some of the random runs; ``python -m tests.random_runs`` makes more, and says how to repeat what fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.random_runs import trial
from tests.random_runs.campaign import Campaign, case_of, seed_of
from tests.random_runs.case import Case, Row, from_line
from tests.random_runs.checking import check
from tests.random_runs.drawing import draw
from tests.random_runs.jobs import JobCase, job_from_line
from tests.random_runs.running import run
from tests.random_runs.shrinking import shrunk
from tests.random_runs.trial import attempt
from tests.random_runs.world import Worlds

SEED, NUM_CASES, NUM_OF_RANKS = 11, 100, 20


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as found:
        yield found


def check_campaign(worlds: Worlds, names: list[str]) -> Campaign:
    campaign = Campaign(worlds)
    for name in names:
        wrong = campaign.add(name)
        assert not wrong, f"python -m tests.random_runs --only {name}: {wrong}"
    assert campaign.biased() == []
    return campaign


@pytest.mark.slow
def test_random_runs_in_this_process(worlds: Worlds) -> None:
    """The odds that a sound engine is called biased are one in a million."""
    names = [seed_of(SEED, number, may_be_ranks=False) for number in range(NUM_CASES)]
    counts = check_campaign(worlds, names).counts
    # What is not drawn is not tried.
    assert counts["preempted"] > NUM_CASES // 5
    assert min(counts[kind] for kind in ("greedy", "gumbel", "rejection")) > NUM_CASES // 6
    assert min(counts[way] for way in ("synchronous", "asynchronous", "auto", "ngram")) > NUM_CASES // 12
    assert counts["threads"] > NUM_CASES // 16


@pytest.mark.ranks
@pytest.mark.slow
def test_random_runs_on_real_ranks(worlds: Worlds) -> None:
    names = [f"{SEED}:{number}:ranks" for number in range(NUM_OF_RANKS)]
    counts = check_campaign(worlds, names).counts
    assert counts["ranks"] == NUM_OF_RANKS and counts["preempted"] > NUM_OF_RANKS // 6


@pytest.mark.ranks
@pytest.mark.slow
def test_jobs_that_are_killed_and_started_again(worlds: Worlds) -> None:
    """One in one process, and one on three ranks."""
    names = [f"{SEED}:{number}:job" for number in range(20)]
    drawn = {case.num_ranks: name for name in names if isinstance(case := case_of(name), JobCase)}
    check_campaign(worlds, [drawn[1], drawn[3]])


def test_a_case_is_drawn_and_written_again_as_it_was() -> None:
    for number in range(50):
        name = seed_of(SEED, number)
        case = case_of(name)
        again = job_from_line(case.line()) if isinstance(case, JobCase) else from_line(case.line())
        assert case == case_of(name) == again and case.is_valid
    assert Case().line() == "{}"


def test_a_failing_case_becomes_small() -> None:
    """Of a failure that needs one option and a second row, nothing else is left."""

    def fails(case: Case) -> bool:
        return case.num_branches > 0 and len(case.rows) > 1

    case = next(case for number in range(100) if fails(case := draw(f"{SEED}:{number}")))
    assert shrunk(case, fails, limit_s=20) == Case(
        cap=1, num_ahead_tokens=1, num_branches=1, rows=(Row(), Row()), max_new_tokens=1
    )


def test_another_token_reason_text_or_count_is_noticed() -> None:
    case = Case(rows=(Row(prompt=(1, 2, 3)),), temperature=1.0, num_logprobs=2, max_new_tokens=6)
    sound = run(case)
    assert check(case, sound).wrong == []
    [completion] = sound.completions
    logprobs = completion.logprobs
    assert logprobs is not None
    other = (completion.token_ids[2] + 1) % 7
    for changed in (
        replace(completion, token_ids=[*completion.token_ids[:2], other, *completion.token_ids[3:]]),
        replace(completion, token_ids=completion.token_ids[:-1]),
        replace(completion, finish_reason="stop"),
        replace(completion, text=completion.text[1:]),
        replace(completion, num_accepted_draft_tokens=completion.num_draft_tokens + 1),
        replace(completion, logprobs=replace(logprobs, raw=[0.1, *logprobs.raw[1:]])),
        replace(completion, logprobs=replace(logprobs, processed=logprobs.processed[1:])),
        replace(completion, error="none"),
    ):
        assert check(case, replace(sound, completions=[changed])).wrong, changed
    assert check(case, replace(sound, completions=[])).wrong


def test_a_run_that_fails_or_has_no_end_is_a_failure_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", 1)
    # The cache has no room for the only row, which a job would refuse.
    found = attempt(Case(spare_pages=-2))
    assert found.is_broken and "TimeoutError: no end within 1 s" in found.wrong[0]
    found = attempt(Case(rows=(Row(prompt=(7,)),)))
    assert found.is_broken and "IndexError" in found.wrong[0]
