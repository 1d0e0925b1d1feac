"""Goodput: the plan of a batch against brute force, and what it learns."""

import dataclasses
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from specdist.policies import (
    VerifiedBlocks,
)
from specdist.policies.costs import CostModel, Curve
from tests.policies.goodput import (
    CAP,
    a_pass,
    drafted_length,
    features_of,
    flat_costs,
    goes_on,
    goodput,
    new_goodput,
    question,
)


def test_it_looks_past_a_first_token_that_does_not_pay() -> None:
    """Two tokens take twice the time of one, but so do eight (as small matrices do on a CPU)."""
    costs = CostModel(Curve([1, 2, 8], [60, 120, 120]), Curve([1], [4]))
    assert drafted_length(goodput(costs), 0.9) == CAP


def test_rows_go_on_by_what_they_are_worth() -> None:
    policy = goodput(flat_costs(target=100, draft=10, per_token=30))
    assert goes_on(policy, 2, 0) == [True, True]
    assert goes_on(policy, 2, 1, features_of([0.005, 0.99])) == [False, True]


def test_a_batch_of_equal_rows_speculates_if_some_length_is_better_than_none() -> None:
    """Against brute force over all lengths, with the forecast as the acceptance of every token."""
    for target, draft, per_token, num_rows in product((50, 200), (5, 30, 90), (0, 3, 20), (1, 4)):
        costs = flat_costs(target=target, draft=draft, per_token=per_token)
        policy = goodput(costs)
        wants = goes_on(policy, num_rows, 0)
        rates = [
            num_rows
            * sum(policy._forecast.of_all**depth for depth in range(length + 1))
            / float(length * draft + costs.target(num_rows * (length + 1)))
            for length in range(CAP + 1)
        ]
        if rates[0] * 1.001 < max(rates):
            assert all(wants), (target, draft, per_token, num_rows)
        elif max(rates) == rates[0] and num_rows == 1:
            assert not any(wants), (target, draft, per_token, num_rows)


@pytest.mark.parametrize("turns", [50, 150])
def test_a_sequence_alone_is_drafted_for_wherever_its_own_rate_grows(turns: int) -> None:
    """Its tokens are to come from it, whatever others have reached: one of which less is accepted than of the
    others would wait for them in vain. Against brute force over all lengths, with its own forecast."""
    free = flat_costs(target=100, draft=20, per_token=2)
    costs = dataclasses.replace(free, synchronous=Curve([1], [turns]))
    answers = set()
    for accepted in range(0, 65, 4):
        policy = goodput(costs, acceptance=0.85)
        histories_RH = np.array([[accepted, 64.0]])
        forecast = float(policy._forecast.of_rows(*histories_RH.T)[0])
        rates = [
            sum(forecast**depth for depth in range(length + 1))
            / float(length * 20 + (turns if length else 0) + costs.target(length + 1))
            for length in range(CAP + 1)
        ]
        pays = max(rates) > rates[0]
        assert goes_on(policy, 1, 0, histories_RH=histories_RH) == [pays]
        answers.add(pays)
    assert answers == {False, True}


def test_what_the_targets_pass_leaves_free_is_used_and_no_more() -> None:
    policy = goodput(flat_costs(target=100, draft=30))
    policy.num_to_verify(features_of([0.5]), np.array([1]), a_pass(1))
    # The next tokens' own step has taken 30 of the 100; two more fit, and a third is worth less than waiting.
    assert drafted_length(policy, 0.3, is_asynchronous=True) == 2


def test_time_to_spare_is_not_kept_for_steps_that_the_round_has_no_room_for() -> None:
    """A pass leaves the time for five steps of one sequence, or two of four: the other three are branches
    that are hardly ever needed, but without more than two steps their time is free."""
    policy = goodput(CostModel(Curve([1], [160]), Curve([1, 4], [20, 50])))
    policy.num_to_verify(features_of([0.5]), np.array([1]), a_pass(1))
    for most_tokens, expected in ((None, 1), (2, 4)):
        asked = dataclasses.replace(
            question(4, 0, is_asynchronous=True, most_tokens=most_tokens),
            reach_R=np.array([1.0, 0.02, 0.02, 0.02]),
        )
        assert (policy.wants(asked) > 0).sum() == expected
    assert not any(goes_on(policy, 4, 2, features_of([0.9] * 4), is_asynchronous=True, most_tokens=2))


def test_what_is_ready_is_verified_while_it_is_worth_the_time() -> None:
    ready = features_of([0.95, 0.9, 0.001, 0.9, 0.001, 0.9])
    dear = goodput(CostModel(Curve([1, 101], [100, 2100]), Curve([1], [1])))
    assert dear.num_to_verify(ready, np.array([4, 0, 2]), a_pass(3)).tolist() == [2, 0, 0]
    cheap = goodput(flat_costs(target=100, draft=1))
    assert cheap.num_to_verify(ready, np.array([4, 0, 2]), a_pass(3)).tolist() == [4, 0, 2]
    assert cheap.num_to_verify(features_of([]), np.array([0, 0]), a_pass(2)).tolist() == [0, 0]


def test_what_any_drafting_takes_is_weighed_once() -> None:
    """Fixed work of the host keeps a block from being begun that its steps alone would pay; once begun, it is
    as long as without that work, or longer. What every round takes makes blocks longer."""
    costs = CostModel(Curve([1, 101], [100, 2100]), Curve([1], [40]))
    alone = drafted_length(goodput(costs), 0.8)
    assert 0 < alone < CAP
    costly = dataclasses.replace(costs, synchronous=Curve([1], [400]))
    assert goes_on(goodput(costly), 1, 0) == [False]
    some = dataclasses.replace(costs, synchronous=Curve([1], [4]))
    assert drafted_length(goodput(some), 0.8) >= alone
    assert drafted_length(goodput(dataclasses.replace(costs, message=Curve([1], [500]))), 0.8) > alone


def test_time_that_was_to_spare_for_drafting_makes_no_token_free_to_verify() -> None:
    """A prompt in one pass gives time for six steps of 40; blocks of two tokens need two of them."""
    policy = goodput(CostModel(Curve([1, 101], [100, 2100]), Curve([1], [40])))
    for depth in range(CAP):
        known = features_of([0.98]) if depth else None
        assert goes_on(policy, 1, depth, known, is_asynchronous=True, num_prompt_tokens=100) == [True]
    ready = features_of([0.95, 0.9, 0.001, 0.001])
    assert policy.num_to_verify(ready, np.array([4]), a_pass(1)).tolist() == [2]


def test_a_prompt_in_the_pass_makes_time_no_cheaper() -> None:
    """A long pass does not lower what a second is worth: the prompt's time is to be paid in any case."""
    costs = flat_costs(target=100, draft=10, per_token=30)
    beside = [any(goes_on(goodput(costs), 8, 0, num_prompt_tokens=each)) for each in (0, 2000)]
    assert beside == [False, False]


def test_a_prompt_in_the_pass_makes_no_ready_token_worth_more() -> None:
    """A token whose time brings more elsewhere is held back from a long pass, too."""
    policy = goodput(CostModel(Curve([1, 1001], [100, 20100]), Curve([1], [1])))
    ready, lengths_R = features_of([0.95, 0.6, 0.4, 0.2]), np.array([4])
    beside = [dataclasses.replace(a_pass(1), num_pass_tokens=1 + each) for each in (0, 900)]
    kept = [policy.num_to_verify(ready, lengths_R, round).tolist() for round in beside]
    assert kept == [[3], [3]]


def test_the_forecast_of_a_row_depends_on_its_own_past_too() -> None:
    """After 0 of 40 and 40 of 40 accepted tokens, when the average is what was assumed."""
    policy = goodput(flat_costs(target=100, draft=10, per_token=32))
    histories_RH = np.array([[0.0, 40.0], [40.0, 40.0]])
    assert goes_on(policy, 2, 0, histories_RH=histories_RH) == [False, True]


def test_the_past_of_a_row_is_its_verified_tokens() -> None:
    policy = goodput(flat_costs(target=100, draft=10))
    blocks = VerifiedBlocks(
        histories_RH=np.array([[0.0, 0.0], [8.0, 16.0]]),
        num_drafted_R=np.array([3, 5]),
        num_accepted_R=np.array([3, 1]),
    )
    # The rejected token counts, those after it do not; two tokens let half of two in 64 fade.
    kept = 0.5 ** (2 / 64)
    expected = [[3.0, 3.0], [8 * kept + 1, 16 * kept + 2]]
    np.testing.assert_allclose(policy.next_histories(blocks), expected)


def test_the_lengths_of_blocks_are_those_of_the_best_rate() -> None:
    """Of all that three blocks of three places may have, by the calibration that is published."""
    rng = np.random.default_rng(3)
    costs = CostModel(Curve([1, 4, 12], [900, 1100, 3000]), Curve([3], [60]), synchronous=Curve([3], [150]))
    for _ in range(20):
        confidences_RB = rng.uniform(0.02, 0.999, (3, 3))
        heights_RB = -0.44 + 0.59 * np.log(confidences_RB / (1 - confidences_RB))
        survival_RB = (1 / (1 + np.exp(-heights_RB))).cumprod(axis=1)

        def rate(lengths: Sequence[int], survival_RB: np.ndarray = survival_RB) -> float:
            expected = sum(line[:length].sum() for line, length in zip(survival_RB, lengths, strict=True))
            return float((3 + expected) / (costs.target_ns(3 + sum(lengths), 3, 0) + 20 * sum(lengths) + 150))

        found = new_goodput(costs).num_to_draw(question(3, 0), confidences_RB)
        assert rate(found) == pytest.approx(max(map(rate, product(range(4), repeat=3))))


def test_blocks_that_give_nothing_are_not_run_for_ever() -> None:
    """Though nothing of them is verified, which else would teach it."""
    policy = new_goodput(flat_costs(target=1000, draft=1, per_token=100))
    num_blocks = [0, 0]
    for turn in range(1500):
        if any(goes_on(policy, 4, 0)):
            assert not policy.num_to_draw(question(4, 0), np.full((4, CAP), 0.05)).any()
            num_blocks[turn >= 100] += 1
    assert num_blocks[0] < 40
    assert 1 <= num_blocks[1] < 100, "tried again, now and then"
