"""The numbers behind the pictures, against runs that are known in all detail."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import specdist
from specdist.data.stats.shard import Stats
from specdist.job.totals.totals import FinishedShard
from specdist.results.report.formats import NOTHING, count, duration, number, percent, size, speed
from specdist.results.report.markup import box, left_out, noted, paragraph, table
from specdist.results.report.panels.acceptance import accepted_share_per_position, drafted_per_position
from specdist.results.report.panels.speed import over_time, replicas_table
from specdist.results.report.panels.traces import acceptance_by_entropy, entropy_edges
from specdist.results.report.runs import labels_of, read_run
from specdist.results.report.shard_figures import ShardFigures
from tests.results.report.synthetic import NUM_TOKENS, SyntheticRun, chance, write_run

SECOND = 10**9


def shard(begin_s: float, end_s: float, *, work_s: float, num_tokens: int) -> Stats:
    stats = Stats(num_completion_tokens=num_tokens, wall_ns=int(work_s * SECOND))
    stats.work_span.extend(int((1000 + begin_s) * SECOND), int((1000 + end_s) * SECOND))
    return stats


def figures(shards: Mapping[int, Stats], replicas: Mapping[int, str]) -> ShardFigures:
    return ShardFigures.of(
        FinishedShard(number_, stats, replicas[number_], 1) for number_, stats in shards.items()
    )


def test_shards_that_overlap_share_their_replica() -> None:
    """Two shards of 300 tokens, the second begun at half of the first: 100 tokens/s all the time."""
    shards = {0: shard(0, 4, work_s=3, num_tokens=300), 1: shard(2, 6, work_s=3, num_tokens=300)}
    found = over_time(figures(shards, {0: "a", 1: "a"}), 6)
    assert found.tokens_per_s == pytest.approx(np.full(6, 100.0))
    assert found.tokens_per_work_s == pytest.approx(np.full(6, 100.0))
    # Two replicas do not share anything: both at work from 2 to 4.
    apart = over_time(figures(shards, {0: "a", 1: "b"}), 6)
    assert apart.tokens_per_s == pytest.approx([75, 75, 150, 150, 75, 75])


def test_speed_over_time_adds_up_to_all_tokens() -> None:
    generator = random.Random(0)
    shards = {}
    for number_ in range(20):
        begin = generator.uniform(0, 50)
        length = generator.uniform(1, 30)
        shards[number_] = shard(begin, begin + length, work_s=length, num_tokens=generator.randrange(1000))
    found = over_time(figures(shards, {number_: str(number_ % 3) for number_ in shards}), 17)
    tokens = float((found.tokens_per_s * np.diff(found.edges_s)).sum())
    assert tokens == pytest.approx(sum(stats.num_completion_tokens for stats in shards.values()))
    # Between two shards nothing is done, and no speed is made up.
    two = {0: shard(0, 1, work_s=1, num_tokens=5), 1: shard(9, 10, work_s=1, num_tokens=5)}
    gap = over_time(figures(two, {0: "a", 1: "a"}), 10)
    assert gap.tokens_per_s[1:9] == pytest.approx(np.zeros(8)) and np.isnan(gap.tokens_per_work_s[1:9]).all()


def test_acceptance_by_place_counts_blocks_that_were_so_long() -> None:
    stats = Stats()
    for drafted, accepted in ((3, 3), (3, 1), (1, 1), (2, 0)):
        stats.observe_block(num_drafted=drafted, num_accepted=accepted)
    assert drafted_per_position(stats).tolist() == [4, 3, 2]
    assert accepted_share_per_position(stats) == pytest.approx([3 / 4, 1 / 3, 1 / 2])


def test_acceptance_by_entropy_is_that_of_the_coins(tmp_path: Path) -> None:
    """Of some 3,500 verified tokens; each interval's 95% bounds should hold its chance nearly always."""
    run = read_run(write_run(tmp_path / "run", SyntheticRun(rows_per_shard=40)), "run")
    assert run.trace is not None
    shares = acceptance_by_entropy(run.trace, entropy_edges([run.trace]))
    assert sum(share.num_tokens for share in shares) == run.trace.num_verified
    inside = 0
    for share in shares:
        low, high = share.bounds
        assert 0 <= low < share.value < high <= 1
        inside += low <= chance((share.low + share.high) / 2) <= high
    assert len(shares) == 10 and inside >= 8


def test_a_run_is_called_by_what_tells_it_apart() -> None:
    assert labels_of([Path("/a/one/run"), Path("/a/two/run")]) == ["one/run", "two/run"]
    assert labels_of([Path("/a/b/one"), Path("/a/b/two")]) == ["one", "two"]
    assert labels_of([Path("/a/b/one")]) == ["b/one"]


def test_replicas_are_told_apart(runs: dict[str, Path]) -> None:
    """The first has done one shard, the second all others; the table has what each of them has."""
    found = read_run(runs["longer"], "run")
    shards = [0, 1, 2, 3]
    stats = specdist.load_run(runs["longer"]).shards
    replicas = np.array([int(shard != shards[0]) for shard in shards])
    columns = {**found.shards.columns, "replica": replicas}
    changed = dataclasses.replace(found.shards, columns=columns, replicas=["node-1-ab", "node-1-cd"])
    markup = replicas_table(dataclasses.replace(found, shards=changed), is_alone=True)
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", markup)
    lines = [cells[at : at + 5] for at, cell in enumerate(cells) if cell.startswith("node-1-")]
    alone = stats[shards[0]]
    rest = sum(stats[shard].num_completion_tokens for shard in shards[1:])
    rest_ns = sum(stats[shard].wall_ns for shard in shards[1:])
    rate = alone.num_completion_tokens * 1e9 / alone.wall_ns
    expected = [
        ["node-1-ab", "1", count(alone.num_completions), count(alone.num_completion_tokens), speed(rate)],
        ["node-1-cd", str(len(shards) - 1), count(found.total.num_completions - alone.num_completions),
         count(rest), speed(rest * 1e9 / rest_ns)],
    ]  # fmt: skip
    assert lines == expected


def test_options_in_force_are_shown(runs: dict[str, Path]) -> None:
    run = read_run(runs["plain"], "run")
    assert run.config["num_draft_tokens"] == 4 and run.num_replicas == 1
    assert read_run(runs["longer"], "run").num_replicas == 2
    assert run.total.num_completion_tokens == 24 * NUM_TOKENS


def test_markup_escapes_whatever_is_not_markup() -> None:
    evil = "<i>&\"'"
    assert paragraph(evil).strip() == "<p>&lt;i&gt;&amp;&#34;&#39;</p>"
    assert left_out("x").strip() == '<p class="missing">x</p>'
    assert "<span>&lt;<small>y</small></span>" in box([noted("<", "y")], "z")
    assert "&lt;i&gt;" in table([evil], [[evil]], caption=evil) and "<i>" not in table([evil], [[evil]])


def test_numbers_as_people_read_them() -> None:
    assert [duration(s) for s in (0, 0.00451, 7.7, 187, 7500, None)] == [
        "0 s", "4.51 ms", "7.7 s", "3 min 07 s", "2 h 05 min", NOTHING
    ]  # fmt: skip
    assert duration(59.7) == "59.7 s" and duration(3599.9) == "1 h 00 min" and duration(2.5e-7) == "0.25 µs"
    assert [speed(v) for v in (1234.5, 43.21, 3.14159, None)] == ["1,234", "43.2", "3.14", NOTHING]
    assert number(1234.567) == "1,234.57" and percent(0.1234) == "12.3%" and percent(None) == NOTHING
    assert [size(v) for v in (10, 2048, 5 * 2**20, 3 * 2**30)] == ["10 B", "2 KiB", "5 MiB", "3.0 GiB"]
