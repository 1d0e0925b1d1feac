"""Policies that look at the whole batch are exact in every mode."""

from typing import Any

import numpy as np
import pytest

from specdist.engine.draft.steps import draft_loop
from specdist.engine.draft.steps.draft_runs import RunLengths
from specdist.policies import (
    Goodput,
    RoundContext,
)
from specdist.policies.costs import CostModel, Curve
from specdist.policies.payoff import RoundShape
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import markov_pair
from tests.engine.sampled import ALARM, FILTERED, PLAIN, markov_replica, p_values
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import noisy_copy, tiny_model

CAP = 4
# Every kind of round follows every other. Who says that the target may go on alone is not believed while
# anything is drafted.
SHAPES = [
    RoundShape(drafts_now=True, num_rounds_alone=1),
    RoundShape(num_ahead=5, num_branches=2, num_rounds_alone=1),
    RoundShape(num_rounds_alone=2),
    RoundShape(num_ahead=1),
    RoundShape(num_rounds_alone=3),
    RoundShape(drafts_now=True, num_rounds_alone=1),
    RoundShape(num_ahead=3, num_branches=1, num_rounds_alone=1),
    RoundShape(drafts_now=True, num_rounds_alone=1),
    RoundShape(),
    RoundShape(num_rounds_alone=4),
]
BRANCHED: dict[str, Any] = {"num_ahead_tokens": 5, "num_branches": 2}
AHEAD: list[dict[str, Any]] = [{}, {**BRANCHED, "shapes": SHAPES}, BRANCHED]
MODES = ["synchronous", "chosen", "branches"]


def goodput(settings: SamplingSettings, *, per_token: int = 1, scale: int = 1) -> Goodput:
    """Costs under which blocks of all lengths occur, in batches of about 100 rows times ``scale``."""
    target = Curve([1, 1 + 400 * scale], [2000, 2000 + 400 * per_token])
    costs = CostModel(target, Curve([1, 1 + 100 * scale], [20, 60]))
    return Goodput(max_draft_tokens=CAP, costs=costs, is_coupled=not settings.is_random)


@pytest.mark.parametrize(
    ("ahead", "settings"),
    [(AHEAD[0], FILTERED), (AHEAD[1], PLAIN), (AHEAD[2], FILTERED)],
    ids=["synchronous-filtered", "chosen-plain", "branches-filtered"],
)
def test_goodput_follows_the_target_s_distribution(ahead: dict[str, Any], settings: SamplingSettings) -> None:
    policy, pair = goodput(settings, scale=5), markov_pair()
    replica = markov_replica(settings, pair=pair, policy=policy, max_num_seqs=500, **ahead)
    found = p_values(replica, pair[0])
    assert min(found) > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    lengths = np.flatnonzero(stats.draft_length_histogram)
    assert len(lengths) > 1 and stats.num_accepted_tokens > 100


@pytest.mark.parametrize(("ahead", "num_steps"), zip(AHEAD, (CAP, 2, 2), strict=True), ids=MODES)
def test_asked_after_several_steps_it_drafts_the_same_blocks(
    monkeypatch: pytest.MonkeyPatch, ahead: dict[str, Any], num_steps: int
) -> None:
    """Where a device is given several steps at a time: with the same plans, one after the other, of which a
    sequence that has ended is not one."""
    target = tiny_model("llama", seed=3)

    def generated() -> tuple[Any, ...]:
        options: dict[str, Any] = {"eos": [7, 9], "max_new_tokens": 60, "max_num_seqs": 5, **ahead}
        replica = Harness(target, noisy_copy(target), num_draft_tokens=CAP, settings=PLAIN, **options)
        asked: list[Any] = []
        replica.policy = policy = goodput(replica.settings, per_token=50)
        plan = policy._sequences_that_pay

        def noted(
            round: RoundContext, draft_slots_A: np.ndarray, survival_A: np.ndarray, num_drafted: int
        ) -> np.ndarray:
            asked.append((num_drafted, draft_slots_A.tolist(), survival_A.tolist()))
            return plan(round, draft_slots_A, survival_A, num_drafted)

        monkeypatch.setattr(policy, "_sequences_that_pay", noted)
        found = [
            c.token_ids for c in replica.generate(requests_for(prompts_of_lengths(5, 23, 40, 2, 11, 17, 8)))
        ]
        stats = replica.stats_recorder.close_shard(0)
        return found, stats.draft_length_histogram, asked

    expected = generated()
    assert len({length for length, *_ in expected[2]}) == CAP
    monkeypatch.setattr(draft_loop, "waits_after_each_step", lambda *_: False)
    monkeypatch.setattr(RunLengths, "next", lambda *_: num_steps)
    assert generated() == expected


@pytest.mark.parametrize("ahead", AHEAD[1:], ids=MODES[1:])
def test_goodput_accepts_a_draft_that_is_the_target(ahead: dict[str, Any]) -> None:
    target = tiny_model("llama", seed=3)
    replica = Harness(target, target, settings=PLAIN, num_draft_tokens=CAP, max_new_tokens=40, **ahead)
    replica.policy = goodput(PLAIN, per_token=0)
    replica.generate(requests_for(prompts_of_lengths(5, 23, 40, 2)))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
