"""The draft in a process of its own: the same tokens, whatever it does while the target verifies."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdist.lab.benchmark.methods import Generated, Method
from specdist.lab.benchmark.pair import fixed_length
from specdist.policies.payoff import RoundShape
from tests.lab.benchmark.comparing import overlap_of
from tests.lab.benchmark.conftest import NUM_DRAFT_TOKENS as K
from tests.lab.benchmark.lineup import PlacedSpecdist, separate_costs, separate_orders
from tests.lab.benchmark.setting import ComparedSetting
from tests.lab.draft_rank import DraftRank, RankOrder
from tests.lab.profile import merge_traces

SYNCHRONOUS = RankOrder(num_slots=2, choice=fixed_length(K))
ASYNCHRONOUS = RankOrder(num_slots=2, choice=fixed_length(K), ahead=RoundShape(num_ahead=3))
BRANCHED = RankOrder(num_slots=3, choice=fixed_length(K), ahead=RoundShape(num_ahead=K + 1, num_branches=2))


@pytest.fixture(scope="module")
def rank(setting: ComparedSetting) -> Iterator[DraftRank]:
    with setting.start_draft_rank() as rank:
        yield rank


def run(method: Method, setting: ComparedSetting) -> Generated:
    method.prepare()
    return method.generate(setting.rows)


@pytest.mark.ranks
def test_every_placement_of_the_draft_gives_the_same_greedy_tokens(
    setting: ComparedSetting, rank: DraftRank
) -> None:
    threads = torch.get_num_threads()
    wanted = run(PlacedSpecdist(setting.paged, SYNCHRONOUS), setting)
    names = []
    for order in (BRANCHED, SYNCHRONOUS, ASYNCHRONOUS, SYNCHRONOUS):
        method = PlacedSpecdist(setting.paged, order, rank)
        names.append(method.name)
        found = run(method, setting)
        assert found.completions == wanted.completions
        assert wanted.stats is not None and found.stats is not None
        overlap = overlap_of(found.stats, order, 1.0)
        assert overlap.acceptance is not None and 0.2 < overlap.acceptance < 1
        assert found.stats.num_misses > 0
        assert overlap.target_idle_share is not None and 0 < overlap.target_idle_share < 1
        assert overlap.draft_idle_share is not None and 0 < overlap.draft_idle_share < 1
        if order is SYNCHRONOUS:
            # Nothing but the placement has changed.
            assert found.stats.num_accepted_tokens == wanted.stats.num_accepted_tokens
            assert found.stats.num_row_steps == wanted.stats.num_row_steps
            assert overlap.predicted_ready_share is None
        else:
            # 120 tokens of rows that end: the model has long ones.
            assert overlap.predicted_ready_share == pytest.approx(overlap.ready_share, abs=0.25)
        assert bool(overlap.num_hits_per_rank) == (order is BRANCHED)
    assert names[:3] == [
        f"specdist, K = {K}, asynchronous, 2 branches",
        f"specdist, K = {K}, separate",
        f"specdist, K = {K}, asynchronous",
    ]
    assert torch.get_num_threads() == threads


@pytest.mark.ranks
def test_the_trace_shows_the_draft_working_while_the_target_verifies(
    setting: ComparedSetting, rank: DraftRank, tmp_path: Path
) -> None:
    """Which can only be seen if both processes read the same clock."""
    order = dataclasses.replace(BRANCHED, trace_folder=str(tmp_path))
    run(PlacedSpecdist(setting.paged, order, rank), setting)
    trace = merge_traces(
        {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("target", "draft")}
    )
    phases = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    of_target, of_draft = (
        [event for event in phases if (event["pid"] == os.getpid()) == is_target]
        for is_target in (True, False)
    )
    # Greedy: no distribution travels, and an answer is soon unpacked.
    assert {event["name"] for event in of_target} >= {"prefill", "verify", "transfer", "idle"}
    assert {event["name"] for event in of_draft} >= {"prefill", "draft", "idle"}
    verifying, drafting = (
        [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == name]
        for events, name in ((of_target, "verify"), (of_draft, "draft"))
    )
    assert any(
        max(verify[0], draft[0]) < min(verify[1], draft[1]) for verify in verifying for draft in drafting
    )
    # Operators inside a phase are in the trace too.
    assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])


@pytest.mark.ranks
def test_the_plan_for_drafting_ahead_follows_from_the_costs_of_both_models(
    setting: ComparedSetting, rank: DraftRank
) -> None:
    costs = separate_costs(setting.paged, rank, SYNCHRONOUS)
    orders = separate_orders(dataclasses.replace(SYNCHRONOUS, costs=costs), num_branches=2)
    assert [order.ahead.num_branches for order in orders] == [0, 0, 2]
    assert [order.ahead.num_ahead > 0 for order in orders] == [False, True, True]
    assert costs.target.sizes[-1] == SYNCHRONOUS.num_slots * (K + 1)
    assert min(*costs.target.ns, *costs.draft.ns) > 0
