"""What the page of mixtures of experts says is so, and can be had again."""

from __future__ import annotations

import json

import pytest

from tests.lab.emulation.experts import (
    ACCEPTANCES,
    ALONE,
    BATCH_SIZES,
    CHOSEN,
    FIXED,
    RESULT,
    SHARED,
    TP_SIZES,
    key_of,
    rates,
)
from tests.lab.emulation.experts import MIXTURES as TARGETS


def test_goodput_loses_nothing_with_experts_where_a_fixed_length_loses_half() -> None:
    """At most a fiftieth of the target's own rate, to learn that the draft is often wrong."""
    settings = json.loads(RESULT.read_text(encoding="utf-8"))["settings"]
    stored = {key_of(one): one["tokens_per_s"] for one in settings}
    assert len(stored) == len(TARGETS) * len(TP_SIZES) * len(BATCH_SIZES) * len(ACCEPTANCES)
    for key, found in stored.items():
        assert min(found[SHARED], found[CHOSEN]) >= 0.98 * found[ALONE], key
    key = ("Qwen/Qwen3-30B-A3B", 1, 1, 0.3)
    found = rates(key, (ALONE, FIXED, SHARED))
    assert found[FIXED] < 0.6 * found[ALONE] and found[SHARED] >= 0.98 * found[ALONE]
    assert found == pytest.approx({name: stored[key][name] for name in found}, rel=0.02)
