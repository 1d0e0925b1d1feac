"""The numbers behind the figures, against runs that are known in all detail."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from specdist.data.stats.shard import Stats
from specdist.job.totals.totals import FinishedShard
from specdist.results.report.figures import (
    accepted_share_by_entropy,
    accepted_share_per_position,
    over_time,
)
from specdist.results.report.formats import NOTHING, count, duration, number, percent, size, speed
from specdist.results.report.runs import read_run
from tests.results.report.synthetic import NUM_TOKENS, SyntheticRun, chance, write_run

SECOND = 10**9


def shard(begin_s: float, end_s: float, *, num_tokens: int, replica: str = "a") -> FinishedShard:
    """One that took three quarters of the time, and as much work."""
    stats = Stats(num_completion_tokens=num_tokens, wall_ns=int(0.75 * (end_s - begin_s) * SECOND))
    stats.work_span.extend(int((1000 + begin_s) * SECOND), int((1000 + end_s) * SECOND))
    return FinishedShard(0, stats, replica, 1)


def test_shards_that_overlap_share_their_replica() -> None:
    """Two shards of 300 tokens, the second begun at half of the first: 100 tokens/s all the time."""
    edges_s, rates, work_rates = over_time([shard(0, 4, num_tokens=300), shard(2, 6, num_tokens=300)], 6)
    assert edges_s == pytest.approx(np.arange(7))
    assert rates == pytest.approx(np.full(6, 100.0)) and work_rates == pytest.approx(np.full(6, 100.0))
    # Two replicas do not share anything: both at work from 2 to 4.
    apart = [shard(0, 4, num_tokens=300), shard(2, 6, num_tokens=300, replica="b")]
    assert over_time(apart, 6)[1] == pytest.approx([75, 75, 150, 150, 75, 75])


def test_speed_over_time_adds_up_to_all_tokens() -> None:
    generator = random.Random(0)
    shards = []
    for place in range(20):
        begin, length = generator.uniform(0, 50), generator.uniform(1, 30)
        num_tokens = generator.randrange(1000)
        shards.append(shard(begin, begin + length, num_tokens=num_tokens, replica=str(place % 3)))
    edges_s, rates, _ = over_time(shards, 17)
    assert rates @ np.diff(edges_s) == pytest.approx(sum(each.stats.num_completion_tokens for each in shards))
    # Between two shards nothing is done, and no speed is made up. One without a time has no tokens.
    nothing = FinishedShard(0, Stats(), "a", 0)
    _, rates, work_rates = over_time([shard(0, 1, num_tokens=5), nothing, shard(9, 10, num_tokens=5)], 10)
    assert rates[1:9] == pytest.approx(np.zeros(8)) and np.isnan(work_rates[1:9]).all()


def test_acceptance_by_position_counts_blocks_that_were_so_long() -> None:
    stats = Stats()
    for drafted, accepted in ((3, 3), (3, 1), (1, 1), (2, 0)):
        stats.observe_block(num_drafted=drafted, num_accepted=accepted)
    assert accepted_share_per_position(stats) == pytest.approx([3 / 4, 1 / 3, 1 / 2])


def test_acceptance_by_entropy_is_that_of_the_coins(tmp_path: Path) -> None:
    """Of some 3,500 verified tokens, in ten groups: three standard deviations are 0.08."""
    run = read_run(write_run(tmp_path / "run", SyntheticRun(rows_per_shard=40)), "run")
    assert run.trace is not None and run.trace.num_rows > 3000
    entropies, shares = accepted_share_by_entropy(run.trace)
    assert len(entropies) == 10 and (np.diff(entropies) > 0).all()
    assert np.abs(shares - [chance(entropy) for entropy in entropies]).max() < 0.08


def test_a_run_is_read_as_its_shards_have_it(runs: dict[str, Path]) -> None:
    """Options with what the manifest has in force, replicas, lengths without those of error rows."""
    run, several = read_run(runs["plain"], "run"), read_run(runs["longer"], "run")
    assert run.config["num_draft_tokens"] == 4 and run.replicas == ["replica-0"]
    assert several.replicas == ["replica-0", "replica-1"] and several.trace is None
    assert [each.replica for each in several.shards] == ["replica-0", "replica-1"] * 2
    assert run.total.num_completion_tokens == run.lengths.sum() == 24 * NUM_TOKENS
    assert read_run(runs["lossy"], "run").lengths.tolist() == [NUM_TOKENS] * 16
    failed = read_run(runs["failed"], "run")
    assert failed.span_s is None and not len(failed.lengths) and failed.total.num_error_rows == 24


def test_numbers_as_people_read_them() -> None:
    assert [duration(s) for s in (0, 0.00451, 7.7, 187, 7500, None)] == [
        "0 s", "4.51 ms", "7.7 s", "3 min 07 s", "2 h 05 min", NOTHING
    ]  # fmt: skip
    assert duration(59.7) == "59.7 s" and duration(3599.9) == "1 h 00 min" and duration(2.5e-7) == "0.25 µs"
    assert [speed(v) for v in (1234.5, 43.21, 3.14159, None)] == ["1,234", "43.2", "3.14", NOTHING]
    assert number(1234.567) == "1,234.57" and percent(0.1234) == "12.3%" and percent(None) == NOTHING
    assert count(1234.0) == "1,234"
    assert [size(v) for v in (0, 10, 2048, 5 * 2**20, 3 * 2**30)] == [
        NOTHING, "10 B", "2 KiB", "5 MiB", "3.0 GiB"
    ]  # fmt: skip
