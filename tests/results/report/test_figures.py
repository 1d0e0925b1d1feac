"""The numbers behind the figures, against runs that are known in all detail."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from specdist.data.stats.shard import Stats
from specdist.job.totals.totals import FinishedShard
from specdist.results.report.figures import accepted_share_per_position, tokens_per_s_over_time
from specdist.results.report.page import NOTHING, shown
from specdist.results.report.runs import labels_of, read_run
from tests.results.report.synthetic import NUM_TOKENS

SECOND = 10**9


def shard(begin_s: float, end_s: float, num_tokens: int) -> FinishedShard:
    stats = Stats(num_completion_tokens=num_tokens, wall_ns=int((end_s - begin_s) * SECOND))
    stats.work_span.extend(int((1000 + begin_s) * SECOND), int((1000 + end_s) * SECOND))
    return FinishedShard(0, stats, "a", 1)


def test_shards_are_spread_over_their_times() -> None:
    """Two shards of 300 tokens, both at work from 2 to 4; between others nothing is done."""
    edges_s, rates = tokens_per_s_over_time([shard(0, 4, 300), shard(2, 6, 300)], 6)
    assert edges_s == pytest.approx(np.arange(7)) and rates == pytest.approx([75, 75, 150, 150, 75, 75])
    nothing = FinishedShard(0, Stats(), "a", 0)
    _, rates = tokens_per_s_over_time([shard(0, 1, 5), nothing, shard(9, 10, 5)], 10)
    assert rates == pytest.approx([5, *np.zeros(8), 5])


def test_speed_over_time_adds_up_to_all_tokens() -> None:
    generator = random.Random(0)
    begins = [generator.uniform(0, 50) for _ in range(20)]
    shards = [shard(each, each + generator.uniform(1, 30), generator.randrange(1000)) for each in begins]
    edges_s, rates = tokens_per_s_over_time(shards, 17)
    assert rates @ np.diff(edges_s) == pytest.approx(sum(each.stats.num_completion_tokens for each in shards))


def test_acceptance_by_position_counts_blocks_that_were_so_long() -> None:
    stats = Stats()
    for drafted, accepted in ((3, 3), (3, 1), (1, 1), (2, 0)):
        stats.observe_block(num_drafted=drafted, num_accepted=accepted)
    assert accepted_share_per_position(stats) == pytest.approx([3 / 4, 1 / 3, 1 / 2])


def test_a_run_is_read_as_its_shards_have_it(runs: dict[str, Path]) -> None:
    """Options with what the manifest has in force, replicas, lengths without those of error rows."""
    run, several = read_run(runs["plain"], "run"), read_run(runs["longer"], "run")
    assert run.config["num_draft_tokens"] == 4
    assert [each.replica for each in several.shards] == ["replica-0", "replica-1"] * 2
    assert run.total.num_completion_tokens == run.lengths.sum() == 24 * NUM_TOKENS
    assert read_run(runs["lossy"], "run").lengths.tolist() == [NUM_TOKENS] * 16
    failed = read_run(runs["failed"], "run")
    assert failed.span_s is None and not len(failed.lengths) and failed.total.num_error_rows == 24


def test_labels_tell_runs_apart() -> None:
    assert labels_of([Path("/a/runs/one")]) == ["runs/one"]
    assert labels_of([Path("/a/one"), Path("/b/one"), Path("/b/two")]) == ["a/one", "b/one", "b/two"]


def test_values_as_people_read_them() -> None:
    found = [shown(value) for value in (1234, 1234.567, 0.12345, "x", ["a"], True, None, [])]
    assert found == ["1,234", "1,235", "0.1235", "x", '["a"]', "true", NOTHING, NOTHING]
