"""The draft in a process of its own: the same tokens, whatever it does while the target verifies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from specdist.benchmark.draft_rank import DraftRank
from specdist.benchmark.drafts import DraftOrder, fixed_length
from specdist.benchmark.methods import Generated, Method
from specdist.benchmark.overlap import overlap_of
from specdist.benchmark.placements import SpecdistColocated, SpecdistSeparate
from specdist.benchmark.plans import measure_separate, separate_orders
from specdist.benchmark.setting import Setting
from specdist.engine.proposals import DraftAhead
from tests.benchmark.conftest import NUM_DRAFT_TOKENS as K

IN_TURNS = DraftOrder(num_slots=2, choice=fixed_length(K))
AHEAD = DraftOrder(num_slots=2, choice=fixed_length(K), ahead=DraftAhead(num_tokens=3))
BRANCHED = DraftOrder(
    num_slots=3, choice=fixed_length(K), ahead=DraftAhead(num_tokens=K + 1, num_branches=2), keeps_spans=True
)


@pytest.fixture(scope="module")
def rank(setting: Setting) -> Iterator[DraftRank]:
    with setting.start_draft_rank() as rank:
        yield rank


def run(method: Method, setting: Setting) -> Generated:
    method.prepare()
    return method.generate(setting.rows)


@pytest.mark.ranks
def test_every_way_of_running_the_draft_gives_the_same_greedy_tokens(
    setting: Setting, rank: DraftRank
) -> None:
    threads = torch.get_num_threads()
    wanted = run(SpecdistColocated(setting.paged, IN_TURNS), setting)
    names = []
    for order in (BRANCHED, IN_TURNS, AHEAD, IN_TURNS):
        method = SpecdistSeparate(setting.paged, rank, order)
        names.append(method.name)
        found = run(method, setting)
        assert found.completions == wanted.completions
        assert wanted.stats is not None and found.stats is not None
        overlap = overlap_of(found.stats, order, 1.0)
        assert overlap.acceptance is not None and 0.2 < overlap.acceptance < 1
        assert overlap.num_misses > 0
        assert overlap.target_idle_share is not None and 0 < overlap.target_idle_share < 1
        assert overlap.draft_idle_share is not None and 0 < overlap.draft_idle_share < 1
        if order is IN_TURNS:
            # Nothing but the place has changed.
            assert found.stats.num_accepted_tokens == wanted.stats.num_accepted_tokens
            assert found.stats.num_row_steps == wanted.stats.num_row_steps
            assert overlap.predicted_ready_share is None
        else:
            # 120 tokens of rows that end: the model has long ones.
            assert overlap.predicted_ready_share == pytest.approx(overlap.ready_share, abs=0.25)
        assert bool(overlap.num_hits_per_rank) == (order is BRANCHED)
        assert bool(found.target_spans and found.draft_spans) == (order is BRANCHED)
    assert names[:3] == [
        f"specdist, K = {K}, ahead, 2 branches",
        f"specdist, K = {K}, separate",
        f"specdist, K = {K}, ahead",
    ]
    assert torch.get_num_threads() == threads


@pytest.mark.ranks
def test_spans_of_both_ranks_are_on_one_clock_and_without_gaps(setting: Setting, rank: DraftRank) -> None:
    found = run(SpecdistSeparate(setting.paged, rank, BRANCHED), setting)
    for spans in (found.target_spans, found.draft_spans):
        for earlier, later in pairwise(spans):
            assert earlier.end_ns == later.begin_ns
    target_kinds = {span.kind for span in found.target_spans}
    # Greedy: no distribution travels, and an answer is soon unpacked.
    assert target_kinds == {"prefill", "verify", "transfer", "idle", "host"}
    assert {span.kind for span in found.draft_spans} == {"prefill", "draft", "transfer", "idle"}
    # While the target verifies, the draft drafts: on two clocks it could not be seen.
    first, last = found.target_spans[0].begin_ns, found.target_spans[-1].end_ns
    drafting = [span for span in found.draft_spans if span.kind == "draft"]
    assert all(first < span.begin_ns < span.end_ns < last + 1e9 for span in drafting)
    assert any(
        max(verify.begin_ns, draft.begin_ns) < min(verify.end_ns, draft.end_ns)
        for verify in found.target_spans
        if verify.kind == "verify"
        for draft in drafting
    )


@pytest.mark.ranks
def test_the_plan_follows_from_costs_of_both_sides(setting: Setting, rank: DraftRank) -> None:
    costs = measure_separate(setting.paged, rank, IN_TURNS.num_slots, [False])
    orders = separate_orders(IN_TURNS, costs, num_branches=2)
    assert [order.ahead.num_branches for order in orders] == [0, 0, 2]
    assert [order.ahead.num_tokens > 0 for order in orders] == [False, True, True]
    assert costs.target.sizes[-1] == IN_TURNS.num_slots * (K + 1)
    assert min(*costs.target.ns, *costs.draft[False].ns) > 0
