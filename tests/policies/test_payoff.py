"""What a round should do: the choice follows costs, batch, context and what was accepted."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from specdist.policies.costs import ContextCosts, CostModel, Curve
from specdist.policies.formulas import asynchronous_round, caught_share, ready_share, tokens_per_call
from specdist.policies.payoff import ALONE, FEWEST_ROUNDS_ALONE, LISTEN, SYNCHRONOUS, RoundChooser, RoundShape

MS = 1_000_000
# A pass takes 20 ms up to 64 tokens and in proportion beyond.
TARGET = Curve([1, 64, 4096], [20 * MS, 20 * MS, 1280 * MS])


def chooser(
    *, step_ms: float = 1, message_ms: float = 0.2, wide_ms: float = 0, **options: object
) -> RoundChooser:
    """A draft step takes as long whatever it holds, plus ``wide_ms`` for every hundred rows."""
    draft = Curve([1, 1001], [round(step_ms * MS), round((step_ms + 10 * wide_ms) * MS)])
    message = Curve([1], [round(message_ms * MS)])
    return RoundChooser(CostModel(TARGET, draft, message=message), max_draft_tokens=8, **options)  # type: ignore[arg-type]


def observe(found: RoundChooser, num_accepted: int, num_rejected: int) -> None:
    """The target has verified blocks of a token each."""
    found.observe(
        np.repeat([1, 0], [num_accepted, num_rejected]),
        np.repeat([False, True], [num_accepted, num_rejected]),
    )


def taught(found: RoundChooser, acceptance: float) -> RoundChooser:
    """It has seen 4000 tokens, accepted at this rate."""
    for _ in range(400):
        observe(found, round(10 * acceptance), 10 - round(10 * acceptance))
    return found


def rate(found: RoundChooser, num_rows: int, shape: RoundShape) -> float:
    """Tokens per nanosecond of rounds of this shape, after contexts of a hundred tokens."""
    return float(found.rates(num_rows, 100.0)[found.shapes.index(shape)])


def best_ahead(found: RoundChooser, num_rows: int) -> tuple[int, float]:
    """The number of candidates with the highest rate, and that rate."""
    rates = {shape: rate(found, num_rows, shape) for shape in found.shapes if shape.num_ahead}
    best = max(rates, key=rates.__getitem__)
    return best.num_ahead - 1, rates[best]


def choose(found: RoundChooser, num_rows: int, *, is_pending: bool = False) -> RoundShape:
    return chosen_at(found, num_rows, 100.0, is_pending=is_pending)


def chosen_at(found: RoundChooser, num_rows: int, context: float, *, is_pending: bool = False) -> RoundShape:
    found.choose(num_rows, context)
    return found.shape(num_rows, context, is_pending=is_pending)


def test_the_rates_are_those_of_the_formulas() -> None:
    found = taught(chooser(wide_ms=1), 0.8)
    lengths = range(1, 9)
    acceptance = round(found.acceptance, 2)
    synchronous = max(
        4 * tokens_per_call(acceptance, length)
        / (length * found._costs.draft_ns(4, 0) + found._costs.target_ns(4 * (length + 1), 4, 0) + 0.2 * MS)
        for length in lengths
    )  # fmt: skip
    assert rate(found, 4, ALONE) == pytest.approx(4 / (20 * MS))
    assert rate(found, 4, SYNCHRONOUS) == pytest.approx(synchronous, rel=0.002)
    # Eight branches: five candidates in six steps, five of them of 36 rows, within the time of the pass.
    tokens = float(asynchronous_round(acceptance, 5, caught_share(8), 0).num_tokens)
    ahead = RoundShape(num_ahead=6, num_branches=8)
    assert rate(found, 4, ahead) == pytest.approx(4 * tokens / (20.2 * MS))


def test_tokens_after_accepted_ones_have_a_rate_of_their_own() -> None:
    """Half of all tokens are accepted, in stretches: two in five first ones, three in four after those."""
    alike, stretches = taught(chooser(step_ms=2), 0.5), chooser(step_ms=2)
    for _ in range(400):
        # Ten blocks of two: four begin well, and three of these go on.
        stretches.observe(np.array([2, 2, 2, 1] + [0] * 6), np.array([False] * 3 + [True] * 7))
    assert stretches.acceptance == pytest.approx(alike.acceptance, abs=0.01)
    first, later = 0.41, 0.69  # nearer to each other, as long as little is known of each
    synchronous = max(
        4 * (1 + sum(first * later**depth for depth in range(length)))
        / (length * 2 * MS + stretches._costs.target_ns(4 * (length + 1), 4, 0) + 0.2 * MS)
        for length in range(1, 9)
    )  # fmt: skip
    assert rate(stretches, 4, SYNCHRONOUS) == pytest.approx(synchronous, rel=0.02)
    assert choose(stretches, 32).num_ahead > choose(alike, 32).num_ahead > 1


@pytest.mark.parametrize(
    ("options", "acceptance", "num_rows", "expected"),
    [
        ({}, 0.8, 2, "asynchronous"),  # the pass leaves the time for it
        ({"wide_ms": 500}, 0.8, 2, "asynchronous, no branches"),
        ({}, 0.2, 64, "alone"),  # all is bound by arithmetic
        ({"step_ms": 30}, 0.8, 2, "alone"),  # a draft slower than the target
        ({"message_ms": 60}, 0.8, 2, "alone"),
        ({"step_ms": 1, "branch_counts": (0,)}, 0.5, 1, "synchronous"),  # half of the rounds ahead are empty
    ],
)
def test_the_fastest_kind_of_round_is_chosen(
    options: dict[str, object], acceptance: float, num_rows: int, expected: str
) -> None:
    found = taught(chooser(**options), acceptance)  # type: ignore[arg-type]
    shape = choose(found, num_rows)
    kinds = {
        "alone": not shape.drafts_now and not shape.num_ahead and shape.num_rounds_alone > 0,
        "synchronous": shape == SYNCHRONOUS,
        "asynchronous": shape.num_ahead > 1 and shape.num_branches > 0,
        "asynchronous, no branches": shape.num_ahead > 1 and shape.num_branches == 0,
    }
    assert kinds[expected], shape


def test_a_fixed_length_is_that_of_synchronous_blocks_and_the_most_of_asynchronous_ones() -> None:
    """Sixteen sequences with three candidates each fill a pass of 64 tokens; more are bound by arithmetic."""
    free, fixed = taught(chooser(step_ms=2), 0.8), taught(chooser(step_ms=2, fixed_length=8), 0.8)
    assert 1 < choose(fixed, 16).num_ahead == choose(free, 16).num_ahead < 9
    acceptance = round(fixed.acceptance, 2)
    synchronous_ns = 8 * fixed._costs.draft_ns(16, 0) + fixed._costs.target_ns(16 * 9, 16, 0) + 0.2 * MS
    expected = 16 * tokens_per_call(acceptance, 8) / synchronous_ns
    assert rate(fixed, 16, SYNCHRONOUS) == pytest.approx(expected, rel=0.002)
    assert rate(fixed, 16, SYNCHRONOUS) < rate(free, 16, SYNCHRONOUS)


def test_a_long_context_makes_candidates_cheap() -> None:
    """At 128 rows a pass is bound by arithmetic; reading 30,000 tokens of context for each row is not."""
    costs = CostModel(
        TARGET, Curve([1], [MS]), ContextCosts(100, 128, target_row_ns=0.05 * MS), Curve([1], [MS // 5])
    )
    found = taught(RoundChooser(costs, max_draft_tokens=8), 0.8)
    assert chosen_at(found, 128, 100.0).num_rounds_alone > 0
    assert chosen_at(found, 128, 30_000.0) == SYNCHRONOUS
    assert costs.target_ns(256, 128, 30_100.0) == TARGET(256) + 30 * 128 * 0.05 * MS


def test_nobody_asks_a_draft_that_does_not_pay_until_it_is_listened_to_again() -> None:
    found = chooser(step_ms=30)
    # Nothing is known of this pair yet; four rows say enough in four rounds.
    for _ in range(4):
        assert choose(found, 4) == LISTEN
        observe(found, 2, 2)
    # What is drafted already is verified first.
    assert choose(found, 4, is_pending=True) == ALONE
    assert choose(found, 4).num_rounds_alone >= FEWEST_ROUNDS_ALONE
    assert choose(found, 4) == LISTEN


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_listening_takes_a_two_hundredth_of_the_time(num_rows: int) -> None:
    found = taught(chooser(step_ms=300, message_ms=5), 0.5)
    num_alone = choose(found, num_rows).num_rounds_alone
    num_heard, num_asked = 0, 1
    while num_heard < 16:
        assert choose(found, num_rows) == LISTEN
        observe(found, num_rows, 0)
        num_heard += num_rows
        num_asked += 1
    assert 5 * num_asked <= 0.005 * 20 * num_alone + 5


def test_it_follows_an_abrupt_change() -> None:
    found = taught(chooser(step_ms=4, message_ms=1, branch_counts=(0,)), 0.9)
    assert choose(found, 32).num_ahead > 1
    for _ in range(20):
        observe(found, 3, 29)
    assert choose(found, 32).num_rounds_alone > 0
    for _ in range(20):
        observe(found, 29, 3)
    assert choose(found, 32).num_ahead > 1


def test_the_rest_of_a_round_keeps_to_what_the_reply_has_said() -> None:
    """A target that goes on alone gets nothing to verify, and one that is to listen must verify first."""
    found = taught(chooser(), 0.95)
    found.choose(4, 100.0)
    ahead = found.shape(4, 100.0, is_pending=True)
    alone = RoundShape(num_rounds_alone=20)
    assert found.shape_ahead(LISTEN, is_pending=False) == ahead and ahead.num_ahead > 1
    assert found.shape_ahead(alone, is_pending=False) == alone
    found = taught(chooser(step_ms=40), 0.01)
    found.choose(4, 100.0)
    assert found.shape_ahead(ahead, is_pending=True) == ALONE
    assert found.shape_ahead(ahead, is_pending=False) == LISTEN


def test_branches_that_catch_little_are_given_up() -> None:
    found = taught(chooser(wide_ms=6), 0.8)
    before = choose(found, 4).num_branches
    for _ in range(60):
        found.observe_misses(before, 10, 0)
    assert 0 == choose(found, 4).num_branches < before


def test_prompts_take_what_they_take_beside_the_candidates() -> None:
    """48 tokens of a prompt beside 16 sequences still fit into the time of a pass; beside 16 with three
    candidates each they are bound by arithmetic."""
    found = taught(chooser(step_ms=0), 0.9)
    before = [rate(found, 16, shape) for shape in (ALONE, SYNCHRONOUS)]
    for _ in range(200):
        found.observe_pass(48, 48)
    after = [rate(found, 16, shape) for shape in (ALONE, SYNCHRONOUS)]
    assert after[0] == before[0] and after[1] < before[1]
    # Eight branches; all rounds have a prompt token per new token.
    caught = caught_share(8)
    new = float(asynchronous_round(0.9, 3, caught, 0).num_tokens)
    ready = ready_share(0.9, 3, caught)
    size = 16 * (1 + 3 * ready)
    beside_ns = TARGET(size + max(48, 16 * new)) - TARGET(size)
    share = min(1, 16 * new / 48)
    expected_ns = share * beside_ns + float(TARGET(size)) + 0.2 * MS
    ahead = RoundShape(num_ahead=4, num_branches=8)
    assert rate(found, 16, ahead) == pytest.approx(16 * new / expected_ns, rel=0.02)


def test_prompts_in_long_chunks_take_longer_than_as_many_tokens_in_short_ones() -> None:
    """Forty tokens beside sixteen sequences are free; four hundred in every tenth pass take 130 ms of it."""
    short, long = (taught(chooser(), 0.8) for _ in range(2))
    for number in range(600):
        short.observe_pass(40, 16)
        long.observe_pass(400 * (number % 10 == 0), 16)
    assert rate(short, 16, ALONE) == pytest.approx(16 / (20 * MS))
    assert rate(long, 16, ALONE) == pytest.approx(16 / ((0.1 * 130 + 0.9 * 20) * MS), rel=0.05)


def test_a_prompt_now_and_then_gives_the_draft_no_time_in_other_rounds() -> None:
    """A thousand tokens of a prompt beside two hundred new ones: every tenth round has one. The steps that
    are worth it in such a round are too many for all others."""
    found = taught(chooser(step_ms=4, branch_counts=(0,)), 0.8)
    before = choose(found, 4).num_ahead
    for _ in range(100):
        for round in range(20):
            found.observe_pass(1000 * (round == 0), 10)
    assert before < 9 and choose(found, 4).num_ahead == before


def test_the_prompts_of_a_first_pass_stand_beside_no_round() -> None:
    found = taught(chooser(), 0.8)
    before = rate(found, 4, ALONE)
    found.observe_pass(100_000, 0)
    assert rate(found, 4, ALONE) == before


def test_the_hosts_time_beside_the_steps_leaves_less_of_it() -> None:
    """Of 20 ms under a pass, 8 ms are the host's: steps of 2 ms fit six times, not ten."""
    draft, host = Curve([1], [2 * MS]), Curve([1], [8 * MS])
    costs = CostModel(TARGET, draft, message=Curve([1], [MS // 5]))
    options: dict[str, Any] = {"max_draft_tokens": 16, "branch_counts": (0,)}
    free = taught(RoundChooser(costs, **options), 0.9)
    busy = taught(RoundChooser(dataclasses.replace(costs, asynchronous=host), **options), 0.9)
    slow = taught(RoundChooser(dataclasses.replace(costs, synchronous=host), **options), 0.9)
    assert best_ahead(free, 1)[0] == 9 and best_ahead(busy, 1)[0] == 5
    assert rate(slow, 1, SYNCHRONOUS) < rate(free, 1, SYNCHRONOUS)
    others = [shape for shape in free.shapes if shape != SYNCHRONOUS]
    assert all(rate(slow, 1, shape) == rate(free, 1, shape) for shape in others)
