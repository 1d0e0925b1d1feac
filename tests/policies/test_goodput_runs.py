"""Goodput asked after many steps at once answers as if it had been asked after each."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

from specdist.policies import DraftFeatures, DraftSequences, Goodput
from specdist.policies.costs import ContextCosts, CostModel, Curve
from tests.policies.goodput import CAP, a_pass, features_of, goodput, question

NUM_ROWS = 3
ROUNDS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"is_asynchronous": True},
    "asynchronous, a prompt": {"is_asynchronous": True, "num_prompt_tokens": 3},
    "little room": {"most_tokens": 4},
}


def costs(step: int) -> CostModel:
    """``step``: nanoseconds of a draft step for one sequence."""
    context = ContextCosts(num_rows=4, target_row_ns=3.0, target_token_ns=1.0, draft_row_ns=2.0)
    synchronous = asynchronous = Curve([1], [5])
    target, draft = Curve([1, 101], [100, 1100]), Curve([1, 4], [step, 2 * step])
    return CostModel(target, draft, context=context, synchronous=synchronous, asynchronous=asynchronous)


def asked_of(round_name: str, num_drafted: int, features: DraftFeatures | None) -> DraftSequences:
    asked = question(NUM_ROWS, num_drafted, features, **ROUNDS[round_name])
    context = dataclasses.replace(asked.round, num_context_tokens=700.0)
    return dataclasses.replace(asked, round=context, reach_R=np.array([1.0, 0.9, 0.7]))


def memory_of(policy: Goodput) -> dict[str, Any]:
    """What answers change."""
    found = {**vars(policy), **vars(policy._forecast)}
    return {name: found[name] for name in found if not name.startswith(("_acceptance", "_forecast"))}


def one_by_one(policy: Goodput, round_name: str, top_DR: np.ndarray) -> int:
    """After how many steps all went on; what the policy remembers is of these."""
    for step, top_R in enumerate(top_DR):
        before = copy.deepcopy(policy.__dict__)
        if not policy.wants_more(asked_of(round_name, step + 1, features_of(top_R))).all():
            policy.__dict__.update(before)
            return step
    return len(top_DR)


@pytest.mark.parametrize("round_name", ROUNDS)
def test_asked_at_once_it_remembers_and_answers_what_it_would_have_step_by_step(round_name: str) -> None:
    rng = np.random.default_rng(5)
    found = set()
    for _ in range(200):
        policy = goodput(costs(int(rng.integers(2, 40))), acceptance=rng.uniform(0.5, 0.95))
        policy.num_to_verify(features_of([0.5]), np.array([1]), a_pass(1))
        if not policy.wants_more(asked_of(round_name, 0, None)).all():
            continue
        top_DR = 1 - rng.choice([0.1, 0.6, 1.0]) * rng.uniform(size=(CAP - 1, NUM_ROWS))
        patient = copy.deepcopy(policy)
        expected = one_by_one(patient, round_name, top_DR)
        number = policy.num_unanimous(asked_of(round_name, 1, None), features_of(top_DR.flatten()))
        assert number == expected
        np.testing.assert_equal(memory_of(policy), memory_of(patient))
        found.add(number)
        if number < len(top_DR):
            last = asked_of(round_name, number + 1, features_of(top_DR[number]))
            assert policy.wants_more(last).tolist() == patient.wants_more(last).tolist()
    assert len(found) >= 3 and 0 in found, found


def test_with_a_head_every_step_is_asked_about() -> None:
    """The estimate of a token comes with the step after it."""
    policy = goodput(costs(9), reads_head=True)
    policy.wants_more(asked_of("synchronous", 0, None))
    assert policy.num_unanimous(asked_of("synchronous", 1, None), features_of([0.99] * 2 * NUM_ROWS)) == 0
