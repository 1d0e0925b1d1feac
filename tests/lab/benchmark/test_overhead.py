"""The stopwatch around a policy, and that the two runs that are compared do the same work."""

from __future__ import annotations

import time

import numpy as np
import pytest

from specdist.data.stats.shard import Stats
from specdist.lab.benchmark.methods import Specdist
from specdist.lab.benchmark.pair import DraftOrder, fixed_length
from specdist.policies import BatchPolicy, DraftSequences, LengthPolicy
from specdist.policies.choice import PolicyChoice
from specdist.policies.costs import CostModel, Curve
from tests.lab.benchmark.conftest import NUM_DRAFT_TOKENS as K
from tests.lab.benchmark.overhead import Stopwatch, fixed_length_told
from tests.lab.benchmark.setting import ComparedSetting

COSTS = CostModel(Curve([1, 16], [10_000, 12_000]), Curve([1, 8], [1_000, 1_500]))
NAP_S = 0.002


def run(
    setting: ComparedSetting, choice: PolicyChoice, kind: type[DraftOrder] = DraftOrder
) -> tuple[Stats, DraftOrder]:
    order = kind(num_slots=3, choice=choice, costs=COSTS)
    method = Specdist(setting.paged, order)
    method.prepare()
    return method.generate(setting.rows).stats, order


def test_the_time_of_a_slow_policy_is_measured_and_its_answers_are_used(
    setting: ComparedSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = PolicyChoice.of("svip", max_draft_tokens=K)
    quick, order = run(setting, choice)
    kind = type(order.policy(setting.paged.settings))
    wants_more = kind.wants_more

    def slowly(self: LengthPolicy, rows: DraftSequences) -> np.ndarray:
        time.sleep(NAP_S)
        return wants_more(self, rows)

    monkeypatch.setattr(kind, "wants_more", slowly)
    slow, stopwatch = run(setting, choice, Stopwatch)
    assert isinstance(stopwatch, Stopwatch)
    assert quick.draft_length_histogram == slow.draft_length_histogram
    # Asked before every step, and once more at the end of most draft batches. Constant lengths are not asked.
    assert slow.num_draft_passes * NAP_S * 1e9 <= stopwatch.ns < slow.wall_ns


def test_a_timed_policy_drafts_as_it_does_without_the_stopwatch(setting: ComparedSetting) -> None:
    """goodput learns from what it is told besides, and counts every token on the way."""
    for name in ("gammatune", "adaedl", "goodput"):
        choice = PolicyChoice.of(name, max_draft_tokens=K)
        (timed, stopwatch), (plain, _) = run(setting, choice, Stopwatch), run(setting, choice)
        assert isinstance(stopwatch.policy(setting.paged.settings), BatchPolicy) == (name == "goodput")
        assert timed.draft_length_histogram == plain.draft_length_histogram
        assert timed.num_draft_passes == plain.num_draft_passes > 0
        assert isinstance(stopwatch, Stopwatch) and stopwatch.ns > 0


def test_computing_features_changes_no_other_work(setting: ComparedSetting) -> None:
    (told, _), (plain, _) = run(setting, fixed_length_told(K)), run(setting, fixed_length(K))
    assert told.draft_length_histogram == plain.draft_length_histogram
    assert told.num_draft_passes == plain.num_draft_passes
    assert told.num_target_passes == plain.num_target_passes
    assert told.num_completion_tokens == plain.num_completion_tokens
