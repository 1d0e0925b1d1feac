"""Statistics add up, survive JSON, and recover costs that they were made from."""

import json
import random

import pytest

from specdist.data.stats.regression import CostSums
from specdist.data.stats.shard import AheadOutcome, Stats, split_proportionally


def some_stats(seed: int) -> Stats:
    generator = random.Random(seed)
    stats = Stats(
        num_rows=3, num_completions=3, num_completion_tokens=50, wall_ns=generator.randrange(10**12)
    )
    stats.target_ns.verify = generator.randrange(10**12)
    stats.draft_ns.draft = generator.randrange(10**12)
    stats.peak_memory_bytes.target = generator.randrange(2**40)
    begin_ns = generator.randrange(2**60)
    stats.work_span.extend(begin_ns, begin_ns + generator.randrange(10**12))
    for _ in range(20):
        drafted = generator.randrange(6)
        stats.observe_block(num_drafted=drafted, num_accepted=generator.randint(0, drafted))
    for _ in range(5):
        stats.cost_sums.observe(
            time_ns=generator.randrange(10**13), num_draft_passes=generator.randrange(900),
            num_target_passes=generator.randrange(300),
        )  # fmt: skip
        stats.num_target_passes += 1
    return stats


def total(parts: list[Stats]) -> Stats:
    summed = Stats()
    for part in parts:
        summed.add(part)
    return summed


def test_a_sum_does_not_depend_on_the_order_and_survives_json() -> None:
    parts = [some_stats(seed) for seed in range(6)]
    expected = total(parts)
    through_json = [Stats.from_json(json.loads(json.dumps(part.to_json()))) for part in reversed(parts)]
    assert total(through_json) == expected
    assert expected.num_rows == 18
    assert expected.num_target_passes == 30
    assert expected.cost_sums.num == 30
    assert expected.peak_memory_bytes.target == max(part.peak_memory_bytes.target for part in parts)
    assert expected.work_span.begin_unix_ns == min(part.work_span.begin_unix_ns for part in parts)
    assert expected.work_span.end_unix_ns == max(part.work_span.end_unix_ns for part in parts)
    # Of shards of an older version nothing is known.
    expected.add(Stats())
    assert expected.work_span.begin_unix_ns > 0


def test_blocks_are_counted_by_position_and_length() -> None:
    stats = Stats()
    for drafted, accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        stats.observe_block(num_drafted=drafted, num_accepted=accepted)
    assert (stats.num_row_steps, stats.num_drafts) == (4, 3)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (8, 4)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 1]
    assert stats.draft_length_histogram == [0, 0, 1, 2]
    assert stats.accepted_length_histogram == [1, 1, 0, 1]
    summary = stats.summary()
    assert summary["mean_acceptance_length"] == pytest.approx(1 + 4 / 3)
    assert summary["draft_acceptance_rate"] == pytest.approx(0.5)


def test_tokens_drafted_ahead_are_counted_by_their_outcome() -> None:
    stats = Stats()
    outcomes = [
        # Nothing ahead, nothing prepared; a chain that goes on; one that breaks at its first token and finds
        # a branch; one that was never reached, without a branch of use.
        (AheadOutcome(0, False, 0, 0, False), True, False),
        (AheadOutcome(4, True, 2, 6, False), True, False),
        (AheadOutcome(3, False, 2, 5, True), True, True),
        (AheadOutcome(2, False, 1, 1, False), False, True),
    ]
    for outcome, is_reached, is_miss in outcomes:
        stats.observe_ahead(outcome, is_reached=is_reached, is_miss=is_miss)
    assert (stats.num_ahead_chains, stats.num_ahead_verified, stats.num_ahead_hits) == (3, 2, 1)
    # Of a chain that goes on the others become candidates, and are counted as such.
    assert stats.num_ahead_tokens == 1 + 3 + 2
    assert (stats.num_branches, stats.num_branch_tokens, stats.num_misses) == (5, 12, 2)
    assert stats.num_branch_hits == 1
    assert stats.summary()["miss_catch_rate"] == 0.5


def test_the_fit_recovers_the_costs_that_made_the_times() -> None:
    generator = random.Random(3)
    sums = CostSums()
    for _ in range(200):
        drafts, targets = generator.randrange(50, 900), generator.randrange(50, 200)
        noise = generator.gauss(1, 0.01)
        sums.observe(
            time_ns=round((23.4e6 * drafts + 112e6 * targets) * noise),
            num_draft_passes=drafts,
            num_target_passes=targets,
        )
    fit = sums.fit()
    assert fit is not None
    assert fit["t_draft_s"] == pytest.approx(0.0234, rel=0.02)
    assert fit["t_target_s"] == pytest.approx(0.112, rel=0.02)
    assert fit["r_squared"] > 0.99
    measured = sums.explained_by(23.4e6, 112e6)
    assert measured is not None and measured["r_squared"] == pytest.approx(fit["r_squared"], abs=1e-3)
    wrong = sums.explained_by(112e6, 23.4e6)
    assert wrong is not None and wrong["r_squared"] < 0.5


def test_parts_add_up_to_the_whole() -> None:
    generator = random.Random(1)
    for _ in range(200):
        weights = {shard: generator.randrange(1, 9) for shard in range(generator.randrange(1, 6))}
        amount = generator.randrange(10**12)
        parts = split_proportionally(amount, weights)
        assert sum(parts.values()) == amount
        for shard, weight in weights.items():
            assert abs(parts[shard] - amount * weight / sum(weights.values())) <= 1
