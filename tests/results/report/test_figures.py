"""The numbers behind the pictures, against runs that are known in all detail."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import yaml

import specdist
from specdist.data.run.publishing import ShardRecord
from specdist.data.stats.figures import FinishedShard, ShardFigures
from specdist.data.stats.shard import Stats
from specdist.results.report.formats import NOTHING, count, duration, number, percent, size, speed
from specdist.results.report.markup import box, left_out, noted, paragraph, table
from specdist.results.report.panels.acceptance import accepted_share_per_position, drafted_per_position
from specdist.results.report.panels.rates import formula_settings, oracle_of, read_tuned, replay_blocks
from specdist.results.report.panels.speed import over_time, replicas_table
from specdist.results.report.panels.traces import acceptance_by_entropy, entropy_edges
from specdist.results.report.runs import labels_of, read_run
from tests.results.report.synthetic import NUM_TOKENS, SyntheticRun, chance, coin_row, write_run

SECOND = 10**9


def shard(begin_s: float, end_s: float, *, work_s: float, num_tokens: int) -> Stats:
    stats = Stats(num_completion_tokens=num_tokens, wall_ns=int(work_s * SECOND))
    stats.work_span.extend(int((1000 + begin_s) * SECOND), int((1000 + end_s) * SECOND))
    return stats


def figures(shards: Mapping[int, Stats], replicas: Mapping[int, str]) -> ShardFigures:
    record = ShardRecord(num_rows=1, num_bytes=1, sha256="")
    return ShardFigures.of(
        FinishedShard(number_, stats, replicas[number_], record) for number_, stats in shards.items()
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


@pytest.fixture(scope="module")
def many_coins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("coins") / "run", SyntheticRun(rows_per_shard=120))


def test_shorter_blocks_give_what_a_run_with_them_gives(many_coins: Path) -> None:
    """K = 2 and a threshold, estimated from blocks of 4, against runs of just these: independent coins are
    the same wherever a round begins. 480 rows leave a spread of about 1%."""
    replayed = replay_blocks(read_run(many_coins, "run"))
    assert replayed is not None
    fixed = {setting.label: setting for setting in replayed["fixed"]}
    for length in (1, 2, 3):
        stats = Stats()
        config = SyntheticRun(num_draft_tokens=length)
        generator = random.Random(99)
        rows = [coin_row(row, generator, stats, config) for row in range(480)]
        stats.num_completion_tokens = sum(row.num_completion_tokens for row in rows)
        setting = fixed[f"K = {length}"]
        assert setting.verification_rate == pytest.approx(stats.verification_rate, rel=0.03)
        assert setting.discard_rate == pytest.approx(stats.discard_rate, rel=0.06)
    rates = [(setting.verification_rate, setting.discard_rate) for setting in replayed["svip"]]
    # A higher threshold on the entropy drafts more: fewer passes, more waste; and beats a fixed length.
    assert rates == sorted(rates, key=lambda rate: -rate[0]) == sorted(rates, key=lambda rate: rate[1])
    middle = next(rate for rate in rates if rate[0] < fixed["K = 2"].verification_rate)
    assert middle[1] < fixed["K = 3"].discard_rate


def test_only_synchronous_blocks_of_a_fixed_length_are_replayed(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    for kind in ("longer", "lossy", "unfinished", "alone"):
        assert replay_blocks(read_run(runs[kind], kind)) is None
    config = yaml.safe_load((runs["plain"] / "config.yaml").read_text())
    for overlap in ("synchronous", "none"):  # as earlier versions wrote it
        plain = shutil.copytree(runs["plain"], tmp_path / overlap)
        (plain / "config.yaml").write_text(yaml.safe_dump(config | {"overlap": overlap}))
        assert replay_blocks(read_run(plain, "plain"))


def test_the_run_is_where_its_own_length_is_and_above_the_oracle(many_coins: Path) -> None:
    run = read_run(many_coins, "run")
    replayed, oracle = replay_blocks(run), oracle_of(run.total)
    assert replayed is not None and oracle is not None
    own = replayed["fixed"][-1]
    assert own.verification_rate == pytest.approx(run.total.verification_rate)
    assert own.discard_rate == pytest.approx(run.total.discard_rate)
    settings = [setting for found in replayed.values() for setting in found]
    assert all(setting.verification_rate > oracle.verification_rate for setting in settings)
    # Rows end with shorter blocks, which the formula has not.
    formula = {setting.label: setting for setting in formula_settings(run.total)}
    assert formula["K = 4"].verification_rate == pytest.approx(own.verification_rate, rel=0.05)


def test_the_oracle_by_hand() -> None:
    """One completion of 12 tokens, half of the verified ones rejected: 5 of 10 between the ends, and one."""
    stats = Stats(num_completions=1, num_completion_tokens=12, num_misses=3)
    stats.observe_block(num_drafted=5, num_accepted=3)
    found = oracle_of(stats)
    assert found is not None and found.verification_rate == pytest.approx(6 / 12)
    assert oracle_of(Stats()) is None


def test_settings_of_a_tuning_are_read_and_told_apart(runs: dict[str, Path], tmp_path: Path) -> None:
    item = {"policy": "svip", "label": "h=0.3", "verification_rate": 0.4, "discard_rate": 0.1}
    alone = {"policy": "goodput", "label": "", "verification_rate": 0.3, "discard_rate": 0.2}
    config = {"temperature": 0.0, "target": "models/target", "top_k": 0}
    document = {"config": config, "settings": [item, item, alone], "oracle": None}
    (tmp_path / "settings.json").write_text(json.dumps(document))
    tuned = read_tuned(tmp_path)
    assert {policy: len(found) for policy, found in tuned.settings.items()} == {"svip": 2, "goodput": 1}
    assert tuned.settings["goodput"][0].label == "goodput" and tuned.oracle is None
    assert tuned.differences(read_run(runs["plain"], "run")) == ["temperature 0.0 (this run: 0.7)"]


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
    without = dataclasses.replace(run, config={})
    assert replay_blocks(without) is None


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
