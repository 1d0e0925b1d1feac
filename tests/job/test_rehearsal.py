"""Rounds that nobody keeps, which tell what the host takes beside passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from specdist import SamplingOptions, SpeculativeLLM
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.job.costs import rehearsal
from specdist.policies.lengths.goodput import Goodput
from tests.job.pair import Pair

MS = 1_000_000
# What these take more than they do, in milliseconds.
ROUND_MS, DRAFTING_MS, ASKING_MS = 12, 20, 10


def slowed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, ms: int) -> None:
    fast: Callable[..., Any] = getattr(owner, name)

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(ms / 1000)
        return fast(*arguments, **named)

    monkeypatch.setattr(owner, name, slow)


def test_a_slow_host_is_found_where_it_is_slow(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round, drafting, and each of its steps, after which the policy is asked: once more than there are
    steps. Each is a slope of rounds whose others take as long as the machine lets them."""
    slowed(monkeypatch, StatsRecorder, "record_round", ROUND_MS)
    slowed(monkeypatch, DraftWorker, "respond", DRAFTING_MS)
    slowed(monkeypatch, Goodput, "wants", ASKING_MS)
    llm = SpeculativeLLM(target=str(pair.target), draft=str(pair.draft), device="cpu", max_num_seqs=4)
    costs = llm._replica.costs
    assert costs is not None
    found = [costs.message.ns[0], costs.synchronous.ns[0], costs.draft.ns[0]]
    wanted = [ROUND_MS, DRAFTING_MS + ASKING_MS, ASKING_MS]
    for ns, ms in zip(found, wanted, strict=True):
        assert 0.4 * ms < ns / MS < 4 * ms, found
    # Nothing of the rounds is left.
    monkeypatch.undo()
    greedy = SamplingOptions(temperature=0.0, max_new_tokens=12)
    alone = SpeculativeLLM(target=str(pair.target), device="cpu", max_num_seqs=4)
    prompts = ["the quick", "a slow brown fox", "over"]
    rows, wanted_rows = (each.generate(prompts, greedy, use_tqdm=False) for each in (llm, alone))
    assert [row.completion_ids for row in rows] == [row.completion_ids for row in wanted_rows]


def test_long_rounds_are_not_rehearsed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "MOST_S", 1e-6)
    llm = SpeculativeLLM(target=str(pair.target), draft=str(pair.draft), device="cpu", max_num_seqs=4)
    costs = llm._replica.costs
    assert costs is not None and (costs.message.ns[0], costs.synchronous.ns[0]) == (250_000, 250_000)
