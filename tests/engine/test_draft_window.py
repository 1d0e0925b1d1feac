"""A draft that sees a window alone: its cache, its pages, and that no token depends on the batch.

The target's distribution is followed whatever the draft says; ``test_distribution.py`` has the views of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdist.data.stats.shard import Stats
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.models.cache.draft_window import NUM_SINK_PAGES, WindowPageTable
from specdist.policies.payoff import RoundShape
from specdist.sampling.distributions import SamplingSettings
from tests.engine.checked import CheckedDraft, CheckedReplica
from tests.engine.harness import PAGE_SIZE, Harness, requests_for
from tests.engine.markov import markov_pair
from tests.engine.sampled import ALARM, COUPLED, PLAIN, PROMPTS, markov_replica, p_values
from tests.engine.test_greedy import MODES, prompts_of_lengths
from tests.engine.test_identity import check_preempted, outcome
from tests.models.families import noisy_copy, tiny_model

AHEAD: list[dict[str, Any]] = [{}, {"num_ahead_tokens": 4}, {"num_ahead_tokens": 4, "num_branches": 2}]
LONG: dict[str, Any] = {"max_new_tokens": 50, "max_seq_len": 64, "draft_window": 10}
every_mode = pytest.mark.parametrize("ahead", AHEAD, ids=MODES)


class WhatIsSeen(CheckedDraft):
    """What each sequence of the draft sees is the tokens that belong there."""

    def check(self, request: ProposalRequest, reply: ProposalReply) -> None:
        state, table = self.state, self.runner.pages
        assert isinstance(table, WindowPageTable)
        for slot in request.slots_R.tolist():
            # The first position that may be run now.
            end = int(min(state.num_computed[slot], state.num_committed[slot] - 1))
            seen = table.visible(np.array([slot]), np.array([end]))
            places = np.arange(seen.places_T[0])
            held = table.pages[slot].tolist()
            # Of which positions these pages are; the first pages are the sequence's first.
            pages = seen.pages_SP[0, places // PAGE_SIZE]
            first = end // PAGE_SIZE - seen.places_T[0] // PAGE_SIZE
            is_sink = places < NUM_SINK_PAGES * PAGE_SIZE
            positions = np.where(is_sink, places, places + first * PAGE_SIZE)
            assert pages.tolist() == [held[position // PAGE_SIZE] for position in positions]
            tokens = state.token_ids[slot, positions] * (positions % (7 - 1) + 1)
            assert (self.runner._cache[pages * PAGE_SIZE + places % PAGE_SIZE] == tokens).all()
            self.num_checked += len(places)


class Windowed(CheckedReplica):
    checks = WhatIsSeen


@pytest.mark.parametrize(
    ("settings", "ahead"), [(PLAIN, AHEAD[0]), (PLAIN, AHEAD[2]), (COUPLED, AHEAD[2])],
    ids=["plain", "plain, branches", "coupled, branches"],
)  # fmt: skip
def test_no_token_depends_on_the_batch_chunks_shared_prefixes_or_preemption(
    ahead: dict[str, Any], settings: SamplingSettings
) -> None:
    """Also under rejection, where a token depends on what the draft said; and all pages come back."""
    requests = requests_for(PROMPTS, 3)
    first = markov_replica(settings, kind=Windowed, **LONG, **ahead)
    expected = outcome(first.generate(requests))
    assert first.checked.num_checked > 1000
    total = Stats()
    for limits in (
        {"max_num_seqs": 2},
        {"max_num_seqs": 20, "num_pages": 24},
        {"max_num_batched_tokens": 23},
    ):
        replica = markov_replica(settings, kind=Windowed, **LONG, **ahead, **limits)
        assert outcome(replica.generate(requests)) == expected, limits
        total.add(replica.stats_recorder.close_shard(0))
        table = replica.runners[1].pages
        assert isinstance(table, WindowPageTable)
        table.begin(np.arange(replica.scheduling.num_slots))
        assert table.num_free_pages == replica.scheduling.num_window_pages
    assert total.num_preemptions > 0 and total.num_misses + total.num_accepted_tokens > 200
    without = markov_replica(settings, **{**LONG, "draft_window": None}, **ahead).generate(requests)
    assert outcome(without) != expected, "the window changes what is accepted"
    if settings is COUPLED:
        assert [completion.token_ids for completion in without] == [each[0] for each in expected]


def test_a_resumed_sequence_sees_what_it_saw() -> None:
    """Of a transformer, whose keys depend on all that was seen before them."""
    target = tiny_model("llama", seed=3)
    common: dict[str, Any] = {"settings": PLAIN, "max_new_tokens": 40, "max_seq_len": 64, "draft_window": 8}
    draft, requests = noisy_copy(target), requests_for(prompts_of_lengths(5, 23, 17, 2), num_samples=2)
    expected = Harness(target, draft, **common).generate(requests)
    check_preempted(target, draft, requests, expected, 40, **common)


@every_mode
def test_the_target_s_distribution_is_followed(ahead: dict[str, Any]) -> None:
    replica = markov_replica(PLAIN, draft_window=6, **ahead)
    found = p_values(replica, markov_pair()[0], 400)
    assert min(found) > ALARM, found


def test_rounds_without_the_draft_leave_it_pages_enough() -> None:
    """Their tokens are run later, many at once."""
    shapes = [
        RoundShape(num_ahead=3, num_branches=1),
        RoundShape(num_rounds_alone=9),
        RoundShape(num_ahead=1),
    ]
    common: dict[str, Any] = {"settings": COUPLED, "num_draft_tokens": 3, "num_ahead_tokens": 4, **LONG}
    pair = markov_pair()
    chosen = Harness(*pair, num_branches=2, shapes=shapes, max_num_seqs=3, **common)
    alone = Harness(pair[0], None, **{**common, "num_ahead_tokens": 0})
    requests = requests_for(PROMPTS, 3)
    found = [completion.token_ids for completion in chosen.generate(requests)]
    assert found == [completion.token_ids for completion in alone.generate(requests)]
    assert chosen.stats_recorder.close_shard(0).num_accepted_tokens > 20


def test_rounds_alone_hold_no_more_pages_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many follow each other: whatever the draft is told, and asked, leaves it what a round may hold,
    and in the end all pages are free."""
    shapes = [RoundShape(num_rounds_alone=300), RoundShape(num_ahead=3, num_branches=1)]
    replica = Harness(
        *markov_pair(), settings=COUPLED, num_draft_tokens=3, num_ahead_tokens=4, num_branches=2,
        shapes=shapes, max_num_seqs=3, max_new_tokens=300, max_seq_len=320, draft_window=10,
    )  # fmt: skip
    table, limits = replica.runners[1].pages, replica.scheduling
    assert isinstance(table, WindowPageTable) and limits.draft_window is not None
    # Candidates and tokens ahead, as limits.num_window_pages has them.
    reach = limits.max_draft_tokens + limits.num_ahead_tokens + 3
    most = limits.num_slots * limits.draft_window.pages_per_slot(reach, limits.max_seq_len)
    held = []
    follow = DraftWorker.follow

    def noting(worker: DraftWorker, request: ProposalRequest) -> None:
        follow(worker, request)
        held.append(limits.num_window_pages - table.num_free_pages)

    monkeypatch.setattr(DraftWorker, "follow", noting)
    replica.generate(requests_for(PROMPTS, 2))
    assert len(held) > 60 and max(held) <= most
    table.begin(np.arange(limits.num_slots))
    assert table.num_free_pages == limits.num_window_pages


@pytest.mark.parametrize(("window", "accepts_all"), [(96, True), (8, False)])
def test_a_draft_that_is_the_target_is_accepted_as_far_as_it_sees(window: int, accepts_all: bool) -> None:
    model = tiny_model("llama", seed=3)
    replica = Harness(model, model, settings=PLAIN, max_new_tokens=40, draft_window=window)
    completions = replica.generate(requests_for(prompts_of_lengths(5, 23, 40)))
    stats = replica.stats_recorder.close_shard(0)
    assert len(completions) == 3 and stats.num_draft_tokens > 60
    # Rounding alone tells the two apart.
    rate = stats.num_accepted_tokens / stats.num_draft_tokens
    assert rate > 0.98 if accepts_all else rate < 0.9
