"""What goodput learns of a draft: it gives one up, tries it again, and finds out what pays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specdist.policies import PutOff, VerifiedBlocks, VerifiedTokens
from specdist.policies.calibration import NUM_TELLING
from specdist.policies.costs import ContextCosts, CostModel
from tests.policies.goodput import (
    CAP,
    drafted_length,
    features_of,
    flat_costs,
    goes_on,
    goodput,
    new_goodput,
)


def test_a_draft_that_is_never_right_is_given_up() -> None:
    policy = goodput(flat_costs(target=100, draft=10, per_token=5))
    assert drafted_length(policy, 0.6) > 0
    for _ in range(400):
        policy.observe_tokens(
            VerifiedTokens(
                features=features_of([0.6] * 4),
                depths_C=np.zeros(4),
                is_accepted_C=np.zeros(4, bool),
            )
        )
    assert drafted_length(policy, 0.6) == 0


def test_it_is_tried_again_after_a_long_time_without() -> None:
    policy = goodput(flat_costs(target=100, draft=10, per_token=5), acceptance=0.05)
    rounds = next(round for round in range(20_000) if any(goes_on(policy, 1, 0)))
    assert rounds > 100


def over_the_target_alone(
    costs: CostModel, acceptances: tuple[float, ...], *, num_rounds: int
) -> list[float]:
    """Tokens per second of a sequence over those of the target alone, in so many rounds with each acceptance
    in turn. What the tokens' features say is always the same."""
    policy, coins, history_RH, found = new_goodput(costs), np.random.default_rng(5), np.zeros((1, 2)), []
    for acceptance in acceptances:
        num_tokens, spent_ns = 0, 0.0
        for _ in range(num_rounds):
            length = 0
            while any(
                goes_on(policy, 1, length, features_of([0.7]) if length else None, histories_RH=history_RH)
            ):
                length += 1
            accepted = int((coins.random(length) < acceptance).cumprod().sum())
            num_tokens += accepted + 1
            spent_ns += length * float(costs.draft(1)) + float(costs.target(length + 1))
            if length:
                depths_C = np.arange(accepted + (accepted < length))
                tokens = VerifiedTokens(
                    features=features_of([0.7] * len(depths_C)),
                    depths_C=depths_C,
                    is_accepted_C=depths_C < accepted,
                )
                policy.observe_tokens(tokens)
                history_RH = policy.next_histories(
                    VerifiedBlocks(
                        histories_RH=history_RH,
                        num_drafted_R=np.array([length]),
                        num_accepted_R=np.array([accepted]),
                    )
                )
        found.append(num_tokens / spent_ns * float(costs.target(1)))
    return found


def test_a_draft_that_pays_is_found_out_and_one_that_does_not_costs_little() -> None:
    """Three tokens in four must be accepted for the first token to pay: what is not tried is not known."""
    costs = flat_costs(target=100, draft=40, per_token=35)
    (dear,) = over_the_target_alone(costs, (0.3,), num_rounds=1500)
    (good,) = over_the_target_alone(costs, (0.95,), num_rounds=1500)
    fixed = sum(0.95**depth for depth in range(CAP + 1)) / (1 + CAP * 0.75)
    assert dear > 0.99 and good > max(1.1, 0.97 * fixed)


def test_after_an_abrupt_change_the_target_alone_goes_on() -> None:
    costs = flat_costs(target=100, draft=40, per_token=35)
    before, after = over_the_target_alone(costs, (0.95, 0.3), num_rounds=1500)
    assert before > 1.1 and after > 0.97


def test_what_was_assumed_gives_way_to_what_was_seen_and_comes_back_in_a_long_pause() -> None:
    policy = new_goodput(flat_costs(target=100, draft=10))
    assumed = policy._forecast.of_all
    outcomes = np.arange(3000) % 2 == 0
    for begin in range(0, 3000, 20):
        policy.observe_tokens(
            VerifiedTokens(
                features=features_of([0.6] * 20),
                depths_C=np.zeros(20),
                is_accepted_C=outcomes[begin : begin + 20],
            )
        )
    assert assumed > 0.85 and policy._forecast.of_all == pytest.approx(0.5, abs=0.005)
    policy.note_pause(200)
    assert policy._forecast.of_all < 0.52
    policy.note_pause(40_000)
    assert policy._forecast.of_all == pytest.approx(assumed, abs=0.01)


def with_prompts(num_missing: list[int], num_left: list[int]) -> dict[str, PutOff]:
    return {"put_off": PutOff(np.array(num_missing), np.array(num_left))}


def prompt_costs() -> CostModel:
    """A prompt's token takes as long as a tenth of a draft step."""
    costs = flat_costs(target=1000, draft=100)
    return dataclasses.replace(costs, context=ContextCosts(draft_prefill_ns=10.0))


def test_acceptance_is_found_out_with_the_sequences_that_have_least_to_run() -> None:
    """Their blocks go on whatever is drawn, until so many tokens are verified that it is known."""
    policy, prompts = new_goodput(prompt_costs()), with_prompts([500, 5, 500, 7], [200] * 4)
    assert goes_on(policy, 4, 0, **prompts) == [False, True, False, True]
    assert all(goes_on(policy, 2, 1, features_of([0.1, 0.1]), **with_prompts([5, 7], [200] * 2)))
    policy._forecast.observe(20, NUM_TELLING)
    assert goes_on(policy, 4, 0, **prompts) == [True] * 4
    assert not all(goes_on(policy, 2, 1, features_of([0.001] * 2), **with_prompts([5, 7], [200] * 2)))


def test_what_can_bring_nothing_is_not_tried() -> None:
    """Few tokens are left, or a draft that is always right would gain nothing."""
    assert not any(goes_on(new_goodput(prompt_costs()), 2, 0, **with_prompts([500] * 2, [3] * 2)))
    dear = dataclasses.replace(flat_costs(target=100, draft=100), context=ContextCosts(draft_prefill_ns=1.0))
    assert not any(goes_on(new_goodput(dear), 2, 0, **with_prompts([9] * 2, [500] * 2)))


def test_a_prompt_is_run_only_for_tokens_that_are_worth_it() -> None:
    """Two sequences of which one is nearly done, each with a long prompt that was put off."""
    policy = goodput(prompt_costs(), acceptance=0.9)
    assert goes_on(policy, 2, 0, **with_prompts([500, 500], [400, 4])) == [True, False]
    assert goes_on(policy, 2, 0, **with_prompts([0, 0], [400, 4])) == [True, True]
