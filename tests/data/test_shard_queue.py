"""Shards shared by replicas: each is done once, whoever joins, leaves, or only seems to have left."""

from __future__ import annotations

import os
import random

import pyarrow as pa
import pytest

from specdist.data.leases.opening import open_run_folder
from specdist.data.leases.shard_queue import ShardQueue
from specdist.data.run.manifest import Manifest
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import shard_table
from tests.data.replicas import SILENT_AFTER_S, Member
from tests.data.samples import row_result

MANIFEST = Manifest(fingerprint={"seed": 1})
INPUTS = pa.table({"ref": ["a", "b"]})


def open_(path, *, manifest=MANIFEST, overwrite=False):
    return open_run_folder(path, manifest, "", overwrite)


class Worker:
    """A replica that does one row per call; its rows say who has done them."""

    def __init__(self, output, name, num_shards, *, is_deterministic=True, **options):
        self.name = name
        self.replica = Member(output, name, **options)
        self.folder = RunFolder(output)
        self.seen = []
        self.queue = ShardQueue(
            self.folder,
            self.replica.membership,
            MANIFEST,
            num_shards,
            on_done_elsewhere=self.seen.append,
        )
        self.is_deterministic = is_deterministic
        self.work = None
        self.num_done = 0

    def take(self):
        leased = self.queue.take()
        if leased is not None:
            self.work = leased, self.queue.log(leased)
        return leased and leased.shard

    def row(self, row):
        leased, log = self.work
        text = "text" if self.is_deterministic else self.name
        log.append(row_result(2 * leased.shard + row, completion=text))

    def finish(self):
        leased, log = self.work
        self.work = None
        log.close()
        table = shard_table(INPUTS, list(log.results.values()), first_row=2 * leased.shard, num_samples=1)
        if self.folder.finish_shard(
            leased.shard, table, {"by": self.name}, is_held=lambda: self.queue.is_held(leased)
        ):
            self.queue.finished(leased)
            self.num_done += 1
            return True
        self.queue.lost(leased)
        return False

    def step(self):
        """Do the next thing; False if there is none."""
        if self.work is None:
            return self.take() is not None
        leased, log = self.work
        rows = [row for row in range(2) if (2 * leased.shard + row, 0) not in log.results]
        if rows:
            self.row(rows[0])
        else:
            self.finish()
        return True


def test_a_shard_that_was_begun_since_the_leases_were_read_stays_with_its_holder(tmp_path, monkeypatch):
    """Its log is there, and no lease was: as if the lease had been dropped."""
    open_(tmp_path)
    a, b = (Worker(tmp_path, name, 2) for name in "ab")
    before = b.queue.look()
    assert a.take() == 0
    a.row(0)
    monkeypatch.setattr(b.queue._leases, "look", lambda: before)
    assert b.take() == 1
    a.row(1)
    assert a.finish()


def test_a_run_is_done_once_every_shard_is_seen_complete(tmp_path):
    open_(tmp_path)
    a, b = (Worker(tmp_path, name, 3) for name in "ab")
    while a.step():
        pass
    assert a.queue.is_done and a.num_done == 3 and a.seen == []
    assert not b.queue.is_done
    assert b.take() is None
    assert b.queue.is_done and b.seen == [0, 1, 2]
    assert not list(tmp_path.glob("leases/shard*")) and not list(tmp_path.glob("parts/*"))


@pytest.mark.parametrize("who_finishes_first", ["a", "b"])
def test_a_paused_holder_and_its_successor_leave_one_result(tmp_path, who_finishes_first):
    """The first wakes up after its lease was taken over, and goes on writing into its own log."""
    open_(tmp_path)
    a, b = (Worker(tmp_path, name, 1, is_deterministic=False) for name in "ab")
    a.take()
    a.row(0)
    for _ in range(int(SILENT_AFTER_S) + 2):
        b.replica.clock.now += 1
        b.take()
    assert b.work is not None
    a.row(1)
    b.row(1)
    if who_finishes_first == "a":
        # It has all rows, but no longer holds the lease.
        assert not a.finish() and b.finish()
    else:
        assert b.finish() and not a.finish()
    rows = pa.ipc.open_file(RunFolder(tmp_path).data_path(0)).read_all().to_pylist()
    assert [row["completion"] for row in rows] == ["a", "b"]
    assert RunFolder(tmp_path).shard_stats() == [{"by": "b"}]
    assert a.take() is None and a.queue.is_done and a.seen == [0]


@pytest.mark.parametrize(
    "step",
    ["publishing.Attempt.publish_stats", "run_folder.RunFolder.sweep"],
)
def test_a_shard_whose_holder_died_while_it_finished_is_completed(tmp_path, monkeypatch, step):
    """Its data has the final name, so it is not generated again; no temporary files remain."""
    open_(tmp_path)
    a, b = (Worker(tmp_path, name, 1, is_deterministic=False) for name in "ab")
    a.take()
    a.row(0)
    a.row(1)
    with monkeypatch.context() as patch:
        patch.setattr(f"specdist.data.run.{step}", crash)
        with pytest.raises(KeyboardInterrupt):
            a.finish()
    for _ in range(int(SILENT_AFTER_S) + 2):
        b.replica.clock.now += 1
        assert b.take() is None
    assert b.queue.is_done
    assert RunFolder(tmp_path).shard_stats() == [{"by": "a"}]
    assert not [path for name in ("leases/shard*", "parts/*", "*/*.tmp") for path in tmp_path.glob(name)]


def crash(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("seed", range(2))
def test_replicas_that_join_pause_and_die_at_random_do_every_row_once(tmp_path, monkeypatch, seed):
    """They join late, pause past their leases' age, go on, die, and are replaced."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    rng = random.Random(seed)
    num_shards = 6
    open_(tmp_path)
    names = iter(range(1000))

    def worker():
        name = f"replica{next(names)}"
        return Worker(tmp_path, name, num_shards, is_deterministic=False, start=rng.random() * 1e6)

    workers, paused = [worker(), worker()], []
    for _ in range(5000):
        if workers and workers[0].queue.is_done:
            break
        for someone in workers + paused:
            someone.replica.clock.now += 1
        for someone in workers:
            someone.replica.beat()
        if not workers or rng.random() < 0.02:
            workers.append(worker())
        active = rng.choice(workers)
        chance = rng.random()
        if chance < 0.02:
            workers.remove(active)  # dies
        elif chance < 0.07:
            workers.remove(active)
            paused.append(active)
        elif chance < 0.1 and paused:
            workers.append(paused.pop(rng.randrange(len(paused))))
        else:
            active.step()
    folder = RunFolder(tmp_path)
    assert all(folder.is_complete(shard) for shard in range(num_shards))
    before = {shard: folder.data_path(shard).read_bytes() for shard in range(num_shards)}
    # Replicas that were paused until the end wake up, and change nothing.
    for sleeper in paused:
        while sleeper.step():
            pass
    assert before == {shard: folder.data_path(shard).read_bytes() for shard in range(num_shards)}
    assert not list(tmp_path.glob("shards/*.tmp"))
    for shard in range(num_shards):
        rows = pa.ipc.open_file(folder.data_path(shard)).read_all().to_pylist()
        assert [row["row_id"] for row in rows] == [2 * shard, 2 * shard + 1]
