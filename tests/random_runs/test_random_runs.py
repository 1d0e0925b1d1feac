"""Some of the random runs; ``python -m tests.random_runs`` makes more, and says how to repeat what fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.random_runs import trial
from tests.random_runs.campaign import Campaign, found_of
from tests.random_runs.case import Case, Row
from tests.random_runs.checking import check
from tests.random_runs.running import run
from tests.random_runs.trial import attempt

SEED, NUM_CASES, NUM_OF_RANKS = 11, 64, 14


def check_campaign(names: list[str]) -> Campaign:
    campaign = Campaign()
    for name, found in zip(names, found_of(names), strict=True):
        assert not found.wrong, f"python -m tests.random_runs --only {name}: {found.wrong}"
        campaign.add(name, found)
    assert campaign.biased() == []
    return campaign


@pytest.mark.slow
def test_random_runs_in_this_process() -> None:
    """The odds that a sound engine is called biased are one in a million."""
    counts = check_campaign([f"{SEED}:{number}" for number in range(NUM_CASES)]).counts
    # What is not drawn is not tried.
    assert counts["preempted"] > NUM_CASES // 5
    assert min(counts[kind] for kind in ("greedy", "gumbel", "rejection")) > NUM_CASES // 6
    assert min(counts[way] for way in ("synchronous", "asynchronous", "auto", "ngram")) > NUM_CASES // 12
    assert counts["threads"] > NUM_CASES // 16


@pytest.mark.ranks
@pytest.mark.slow
def test_random_runs_on_real_ranks() -> None:
    counts = check_campaign([f"{SEED}:{number}:ranks" for number in range(NUM_OF_RANKS)]).counts
    assert counts["ranks"] == NUM_OF_RANKS and counts["preempted"] > NUM_OF_RANKS // 6


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
