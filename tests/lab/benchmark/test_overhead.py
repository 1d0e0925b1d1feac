"""The stopwatch around a policy, and that the two runs that are compared do the same work."""

from __future__ import annotations

import time

import numpy as np

from specdist.data.stats.shard import Stats
from specdist.lab.benchmark.methods import Specdist
from specdist.lab.benchmark.setting import Setting
from specdist.lab.benchmark.sides.drafts import DraftOrder, fixed_length
from specdist.lab.benchmark.sides.overhead import Stopwatch, fixed_length_told
from specdist.policies import BatchPolicy, DraftSequences, FixedLength, LengthPolicy
from specdist.policies.choice import PolicyChoice, build_policy
from specdist.policies.costs import CostModel, Curve
from tests.lab.benchmark.conftest import NUM_DRAFT_TOKENS as K

COSTS = CostModel(Curve([1, 16], [10_000, 12_000]), Curve([1, 8], [1_000, 1_500]))
NAP_S = 0.002


class Slow(FixedLength):
    """Sleeps before it answers."""

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        time.sleep(NAP_S)
        return super().wants_more(rows)


def run(setting: Setting, choice: PolicyChoice, policy: LengthPolicy | None = None) -> Stats:
    method = Specdist(setting.paged, DraftOrder(num_slots=3, choice=choice, costs=COSTS))
    method.prepare()
    found = method.generate(setting.rows, policy)
    assert found.stats is not None
    return found.stats


def watched(policy: LengthPolicy) -> Stopwatch:
    stopwatch = Stopwatch()
    stopwatch.watch(policy)
    return stopwatch


def test_the_time_of_a_slow_policy_is_measured_and_its_answers_are_used(setting: Setting) -> None:
    quick, slow = FixedLength(K), Slow(K)
    stopwatch = watched(slow)
    found = [run(setting, fixed_length(K), policy) for policy in (quick, slow)]
    assert found[0].draft_length_histogram == found[1].draft_length_histogram
    # Asked before every step, and once more at the end of most draft batches.
    assert stopwatch.ns >= found[1].num_draft_passes * NAP_S * 1e9
    assert stopwatch.ns < found[1].wall_ns


def test_a_timed_policy_drafts_as_it_does_without_the_stopwatch(setting: Setting) -> None:
    """goodput learns from what it is told besides, and counts every token on the way."""
    for name in ("gammatune", "adaedl", "goodput"):
        choice = PolicyChoice.of(name, max_draft_tokens=K)
        policy = build_policy(choice, COSTS, is_coupled=True)
        stopwatch = watched(policy)
        assert isinstance(policy, BatchPolicy) == (name == "goodput")
        timed, plain = run(setting, choice, policy), run(setting, choice)
        assert timed.draft_length_histogram == plain.draft_length_histogram
        assert timed.num_draft_passes == plain.num_draft_passes > 0
        assert stopwatch.ns > 0


def test_computing_features_changes_no_other_work(setting: Setting) -> None:
    told, plain = run(setting, fixed_length_told(K)), run(setting, fixed_length(K))
    assert told.draft_length_histogram == plain.draft_length_histogram
    assert told.num_draft_passes == plain.num_draft_passes
    assert told.num_target_passes == plain.num_target_passes
    assert told.num_completion_tokens == plain.num_completion_tokens
