"""The draft of a run may change where no token, or no shard, is of two drafts; and the manifest says so."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from specdist.data.run.manifest import Manifest, ShardPlan
from specdist.data.run.segments import (
    ANY_TIME,
    BETWEEN_SHARDS,
    DRAFT_CHANGES,
    NEVER,
    next_segment,
    segments_of,
)
from specdist.utils.errors import UserError

FIRST = Manifest(
    fingerprint={"draft": "aa", "seed": 1, "stop": []},
    info={"draft": "first", "costs": {"t": 1}, "exact": True},
)


@dataclass
class Shards:
    recorded: set[int] = field(default_factory=set)
    begun: list[int] = field(default_factory=list)

    def recorded_shards(self) -> set[int]:
        return self.recorded

    def begun_shards(self) -> list[int]:
        return self.begun

    def plan(self) -> ShardPlan:
        return ShardPlan(80, 10)


def asked(draft: str = "bb", rule: str = ANY_TIME, **more: Any) -> Manifest:
    info = {"draft": f"folder {draft}", DRAFT_CHANGES: rule}
    return Manifest(fingerprint={"draft": draft, "seed": 1, "stop": []} | more, info=info)


def test_the_next_draft_is_recorded_and_its_costs_are_measured_anew() -> None:
    found = next_segment(FIRST, asked(), Shards({0, 1}, [1, 2]), None)
    assert found is not None and found.fingerprint == FIRST.fingerprint
    assert segments_of(found) == [
        {"draft": "first", "fingerprint": {"draft": "aa"}, "complete_shards": 0},
        {"draft": "folder bb", "fingerprint": {"draft": "bb"}, "complete_shards": 2},
    ]
    assert "costs" not in found.info and found.info["exact"]
    assert found.info["draft"] == "folder bb"
    # The latest draft again changes nothing; the first one again is a third segment.
    assert next_segment(found, asked(), Shards(), None) is None
    third = next_segment(found, asked("aa"), Shards({0, 1, 2}), None)
    assert third is not None
    assert [each["fingerprint"]["draft"] for each in segments_of(third)] == ["aa", "bb", "aa"]


@pytest.mark.parametrize("changed", [asked(rule=NEVER), asked(seed=2), replace(asked(), info={})])
def test_what_changes_tokens_is_refused(changed: Manifest) -> None:
    with pytest.raises(UserError, match="--output holds a run with different settings"):
        next_segment(FIRST, changed, Shards(), None)


def test_with_rejection_no_shard_has_rows_of_two_drafts() -> None:
    changed = asked(rule=BETWEEN_SHARDS)
    with pytest.raises(UserError, match=r"shards are begun \(2, 5\): finish them with --draft first"):
        next_segment(FIRST, changed, Shards({0, 1}, [1, 2, 5]), None)
    with pytest.raises(UserError, match="while replica x is at work there"):
        next_segment(FIRST, changed, Shards({0, 1}, [1]), lambda: "replica x")
    assert next_segment(FIRST, changed, Shards({0, 1}, [1]), lambda: None) is not None
