"""A run of many shards, in numbered folders."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from specdist.data.leases.leases import lease_files
from specdist.data.leases.membership import Membership
from specdist.data.leases.shard_queue import ShardQueue
from specdist.data.run.layout import SHARDS_PER_FOLDER, SUBTOTAL, TOTAL, data_pattern, layout_info
from specdist.data.run.manifest import Manifest
from specdist.data.run.merging import merge_run
from specdist.data.run.reading import read_columns
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import shard_table
from specdist.data.stats.shard import Stats
from specdist.job.totals.status import StatusReader
from specdist.job.totals.totals import subtotalled, total_of, write_total
from tests.data.folders import INPUTS, contents, open_
from tests.data.samples import row_result

NUM_SHARDS = 8
MANIFEST = Manifest(
    fingerprint={"num_rows": NUM_SHARDS, "rows_per_shard": 1, "num_samples": 1}, info={SHARDS_PER_FOLDER: 3}
)
FOURS = Manifest(fingerprint=MANIFEST.fingerprint, info={SHARDS_PER_FOLDER: 4})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of eight shards in folders of three, all but the last two complete."""
    folder = open_(tmp_path, manifest=MANIFEST)
    for shard in range(NUM_SHARDS - 2):
        finish(folder, shard)
    return folder


def finish(folder: RunFolder, shard: int) -> None:
    results = [row_result(shard, num_completion_tokens=shard)]
    with folder.parts(shard) as log:
        log.append(results[0])
    table = shard_table(INPUTS.slice(0, 1), results, first_row=shard, num_samples=1)
    assert folder.finish_shard(shard, table, Stats(num_completion_tokens=shard).to_json())
    write_total(folder, shard, NUM_SHARDS)


def test_only_a_run_of_many_shards_has_numbered_folders() -> None:
    assert not layout_info(1000)
    assert layout_info(1001)


def test_in_the_order_of_their_paths_the_rows_are_in_input_order(folder: RunFolder) -> None:
    paths = sorted(folder.path.glob(data_pattern(MANIFEST.info)))
    assert [read_columns(path, ["row_id"])["row_id"][0].as_py() for path in paths] == [0, 1, 2, 3, 4, 5]
    assert {path.parent.name for path in paths} == {"00000", "00001"}
    assert not list(folder.path.glob("parts/*/*"))


def test_a_total_is_the_sum_of_its_shards(folder: RunFolder) -> None:
    assert folder.groups_with(TOTAL) == {"00000", "00001"}
    assert total_of(folder, range(6)).stats.num_completion_tokens == 15
    assert total_of(folder, range(6)).num_rows == 6
    # Only what was asked for; and what a damaged total sums is still there.
    assert total_of(folder, [0, 1, 3, 4, 5]).stats.num_completion_tokens == 13
    folder.sum_path(TOTAL, "00001").write_text("{}")
    assert total_of(folder, range(6)).stats.num_completion_tokens == 15
    # The files of shards are not read again.
    for shard in range(3):
        folder.stats_path(shard).unlink()
    assert total_of(folder, range(6)).stats.num_completion_tokens == 15


def test_the_last_folder_may_have_fewer_shards(folder: RunFolder) -> None:
    finish(folder, 6)
    assert folder.groups_with(TOTAL) == {"00000", "00001"}
    finish(folder, 7)
    assert folder.groups_with(TOTAL) == {"00000", "00001", "00002"}
    assert folder.recorded_shards() == set(range(NUM_SHARDS))
    assert merge_run(folder, folder.path.parent / "merged.arrow") == NUM_SHARDS


@pytest.fixture
def unfinished(tmp_path: Path) -> RunFolder:
    """A run in folders of four shards, of which the first has three that are complete: one is summed."""
    folder = open_(tmp_path, manifest=FOURS)
    for shard in (2, 0, 1):
        finish(folder, shard)
    return folder


def test_a_subtotal_is_of_the_shards_that_it_names(unfinished: RunFolder) -> None:
    assert unfinished.groups_with(SUBTOTAL) == {"00000"}
    assert subtotalled(unfinished, "00000") == {0, 2}
    assert total_of(unfinished, [0, 1, 2]).stats.num_completion_tokens == 3
    assert total_of(unfinished, [0, 1]).stats.num_completion_tokens == 1
    status = StatusReader(unfinished.path).read()
    assert (status.num_done, status.num_rows, status.num_tokens) == (3, 3, 3)
    # What it sums is not read again; what a damaged one sums is still there.
    kept = unfinished.stats_path(2).rename(unfinished.path / "kept")
    assert total_of(unfinished, [0, 1, 2]).num_rows == 3
    kept.rename(unfinished.stats_path(2))
    unfinished.sum_path(SUBTOTAL, "00000").write_text("{}")
    assert total_of(unfinished, [0, 1, 2]).stats.num_completion_tokens == 3


def test_a_subtotal_ends_with_a_restart_and_with_the_total(unfinished: RunFolder) -> None:
    unfinished.data_path(2).unlink()
    again = open_(unfinished.path, manifest=FOURS)
    assert not again.groups_with(SUBTOTAL)
    for shard in (2, 3):
        finish(again, shard)
    assert (again.groups_with(TOTAL), again.groups_with(SUBTOTAL)) == ({"00000"}, set())
    assert total_of(again, range(4)).stats.num_completion_tokens == 6
    finish(again, 4)
    assert again.groups_with(SUBTOTAL) == set()
    other = Manifest(fingerprint={**MANIFEST.fingerprint, "seed": 2})
    open_(again.path, manifest=other, overwrite=True)
    assert sorted(contents(again.path)) == ["config.yaml", "manifest.json"]


@pytest.mark.parametrize("name", ["record", "data", "stats"])
def test_a_shard_that_was_deleted_is_generated_again(folder: RunFolder, name: str) -> None:
    getattr(folder.paths(4), name).unlink()
    again = open_(folder.path, manifest=MANIFEST)
    assert again.recorded_shards() == {0, 1, 2, 3, 5}
    assert again.groups_with(TOTAL) == {"00000"}
    finish(again, 4)
    assert again.groups_with(TOTAL) == {"00000", "00001"}


def test_overwrite_deletes_all_folders(folder: RunFolder) -> None:
    other = Manifest(fingerprint={**MANIFEST.fingerprint, "seed": 2})
    again = open_(folder.path, manifest=other, overwrite=True)
    assert sorted(contents(folder.path)) == ["config.yaml", "manifest.json"]
    finish(again, 0)
    assert again.data_path(0).parent.name == "shards"


def test_replicas_share_shards_with_long_numbers(tmp_path: Path) -> None:
    """The leases of shards from 100,000 on are leases like others."""
    manifest = Manifest(
        fingerprint={"num_rows": 100_002, "rows_per_shard": 1, "num_samples": 1}, info=layout_info(100_002)
    )
    folder = open_(tmp_path, manifest=manifest)
    queues = []
    for name in "ab":
        membership = Membership(tmp_path, silent_after_s=60.0, name=name)
        membership.join()
        queues.append(ShardQueue(folder, membership, manifest, 100_002))
        for shard in range(100_000):
            queues[-1]._open.discard(shard)
    taken = [queue.take() for queue in queues]
    assert [leased.shard for leased in taken if leased] == [100_000, 100_001]
    open_(tmp_path, manifest=manifest)
    assert queues[0].is_held(taken[0])
    assert len(lease_files(folder.leases_path)) == 2


def test_what_a_crash_left_is_completed_by_one_replica_at_a_time(tmp_path: Path) -> None:
    clock = itertools.count().__next__
    first, second, third = (
        Membership(tmp_path, silent_after_s=60.0, name=name, clock=clock) for name in ("a", "b", "c")
    )
    first.join()
    with first.setup():
        assert not first.another_has_tidied()
    second.join()
    with second.setup():
        assert second.another_has_tidied()
    first.leave()
    third.join()
    with third.setup():
        assert not third.another_has_tidied()
    with second.setup():
        assert second.another_has_tidied()
    for membership in (third, second):
        membership.leave()
    assert not list(tmp_path.glob("leases/*"))
