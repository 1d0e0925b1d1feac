"""Rounds whose request is sent before the last one is committed: the same tokens and statistics."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from specdist.engine.request import Request
from specdist.engine.schedule.scheduler import NextRound
from specdist.engine.schedule.stopping import StopRules
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import DETOKENIZER, Harness, decode, requests_for
from tests.engine.markov import repetitive_model
from tests.engine.sampled import PLAIN, PROMPTS, markov_replica
from tests.engine.test_greedy import prompts_of_lengths
from tests.engine.test_scheduler import run_round, scheduler
from tests.models.families import noisy_copy, tiny_model

GUMBEL = SamplingSettings(temperature=1.0, is_coupled=True)
STOPS = range(7, 97, 5)
STRINGS = tuple(decode([token_id]) for token_id in STOPS)
ROWS = prompts_of_lengths(5, 23, 40, 2, 11, 17, 33, 8)


def counted(replica: Harness, requests: list[Request]) -> dict[str, Any]:
    """All that the run has counted but times, and its completions."""
    completions = replica.generate(requests)
    stats = dataclasses.asdict(replica.stats_recorder.close_shard(0))
    sums = stats.pop("cost_sums")
    stats |= {f"sum of {name}": sums[name] for name in ("num", "dd", "dv", "vv")}
    times = {name for name in stats if "_ns" in name or name in ("work_span", "peak_memory_bytes")}
    return {"completions": completions} | {name: stats[name] for name in stats.keys() - times}


@pytest.mark.parametrize("settings", [SamplingSettings(temperature=1.0), GUMBEL], ids=["rejection", "gumbel"])
@pytest.mark.parametrize(
    "options",
    [{}, {"stop": STRINGS, "eos": []}, {"num_ahead_tokens": 3, "num_branches": 2}, None],
    ids=["turns", "strings", "asynchronous", "alone"],
)
def test_most_rounds_are_known_early_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, settings: SamplingSettings, options: dict[str, Any] | None
) -> None:
    """Of sequences that end by tokens and by length, and make room for others."""
    target = tiny_model("llama", seed=3)
    draft = None if options is None else noisy_copy(target, scale=0.06)
    more: dict[str, Any] = {"eos": STOPS} | (options or {})
    replica = Harness(target, draft, settings=settings, max_num_seqs=5, max_new_tokens=24, **more)
    known: list[bool] = []
    ended: list[int] = []
    joined: list[int] = []
    foresee, after = NextRound.foresee, NextRound.after

    def noted(*arguments: Any) -> NextRound | None:
        found = foresee(*arguments)
        known.append(found is not None)
        return found

    def noted_after(self: NextRound, num_accepted_R: np.ndarray, over: list[int]) -> Any:
        plan, last = after(self, num_accepted_R, over)
        ended.extend(over)
        joined.append(len(plan.opened))
        return plan, last

    monkeypatch.setattr(NextRound, "foresee", noted)
    monkeypatch.setattr(NextRound, "after", noted_after)
    early = counted(replica, requests_for(ROWS))
    assert sum(known) / len(known) > 0.9
    assert min(joined) == 0 < max(joined)
    if options is not None and "num_branches" not in options:
        assert ended
    monkeypatch.setattr(NextRound, "foresee", lambda *_: None)
    # Not the difference of two large dictionaries, which takes long to show.
    is_same = early == counted(replica, requests_for(ROWS))
    assert is_same


def test_tokens_drawn_on_the_target_s_side_have_the_random_numbers_of_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With candidates of n-grams the next tokens are drawn where the sequences are looked at."""
    replica = markov_replica(PLAIN, pair=(repetitive_model(), None), ngrams=True, num_draft_tokens=4)
    early = counted(replica, requests_for(PROMPTS, 20))
    assert early["num_accepted_tokens"] > 20
    monkeypatch.setattr(NextRound, "foresee", lambda *_: None)
    is_same = early == counted(replica, requests_for(PROMPTS, 20))
    assert is_same


def test_pages_are_reserved_early_however_many_candidates_are_accepted() -> None:
    for num_accepted in range(4):
        rounds = scheduler([6, 9], max_new_tokens=40, max_num_seqs=2)
        run_round(rounds.plan())
        plan = rounds.plan()
        for sequence in plan.decoding:
            sequence.begin_block(7, 3, missed=False)
        updates = rounds.reserve_early([3, 3])
        assert updates is not None and len(updates.slots)
        for sequence in plan.decoding:
            sequence.end_block([7] * num_accepted, 3)
        # The scheduler's own plan needs nothing more.
        assert not len(rounds.plan().page_updates.slots)


def test_a_round_known_early_has_pages_for_its_blocks_when_a_sequence_has_ended() -> None:
    """The others have more room in a pass then, and no pages for it yet."""
    rounds = scheduler(
        [6, 9], max_new_tokens=50, max_num_seqs=2, max_num_batched_tokens=32, max_draft_tokens=20,
        shares_room=True,
    )  # fmt: skip
    run_round(rounds.plan())
    plan = rounds.plan()
    first, second = plan.decoding
    blocks = []
    for sequence in plan.decoding:
        sequence.begin_block(7, 3, missed=False)
        blocks.append((sequence, [7] * 3))
    early = NextRound.foresee(rounds, StopRules(DETOKENIZER), blocks, plan)
    assert early is not None
    rounds.finish(first)
    later, _ = early.after(np.array([3, 3]), [0])
    second.end_block([7] * 3, 3)
    (limit,) = later.draft_limits
    assert len(second.token_ids) + 1 + limit <= second.num_reserved
    assert 0 < limit < rounds.most_candidates


@pytest.mark.parametrize(("num_pages", "is_known"), [(100, True), (5, False)])
def test_a_round_that_lacks_pages_is_not_known_early(num_pages: int, is_known: bool) -> None:
    rounds = scheduler([8], num_pages=num_pages, max_num_batched_tokens=8)
    run_round(rounds.plan())
    assert (rounds.reserve_early([0]) is not None) == is_known


def test_in_the_place_of_a_sequence_that_has_ended_another_begins_with_its_own_pages_alone() -> None:
    """Two entries of one place in a round would have either page, as a device likes."""
    rounds = scheduler([6, 9, 30], max_new_tokens=40, max_num_seqs=2)
    run_round(rounds.plan())
    begun = rounds.plan()
    first, second = begun.decoding
    slot = first.slot
    first.begin_block(7, 3, missed=False)
    second.begin_block(7, 3, missed=False)
    blocks = [(sequence, [7] * 3) for sequence in (first, second)]
    early = NextRound.foresee(rounds, StopRules(DETOKENIZER), blocks, begun)
    assert early is not None and {slot, second.slot} <= set(early.page_updates.slots.tolist())
    rounds.finish(first)
    plan, _ = early.after(np.array([3, 3]), [0])
    assert [each.slot for each in plan.opened] == [slot]
    assert (plan.decoding, plan.draft_limits) == ([second], [3])
    updates = plan.page_updates
    assert PageUpdates.joined([PageUpdates.from_entries([]), updates]) is updates
    own = updates.slots == slot
    assert own.sum() == len(set(updates.indices[own].tolist())) > 0
    assert (~own).sum() == (early.page_updates.slots == second.slot).sum()
