"""Leases and heartbeats in numbered folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdist.data.leases import lease_folders
from specdist.data.leases.lease_folders import listings, placed, replicas_in
from specdist.data.leases.leases import Lease, lease_files, shard_name, sub_shard_name
from specdist.data.leases.membership import Membership
from specdist.data.leases.shard_queue import ShardQueue
from specdist.data.run.layout import SHARDS_PER_LEASE_FOLDER, layout_info
from specdist.data.run.manifest import Manifest
from tests.data.folders import open_
from tests.data.replicas import Member

NUM_SHARDS = 2500
NAME = shard_name(1500, "00001")


def manifest(info: dict[str, object]) -> Manifest:
    return Manifest(fingerprint={"num_rows": NUM_SHARDS, "rows_per_shard": 1, "num_samples": 1}, info=info)


def queues(path: Path, manifest: Manifest, *names: str) -> list[ShardQueue]:
    folder = open_(path, manifest=manifest)
    return [ShardQueue(folder, Member(path, name).membership, manifest, NUM_SHARDS) for name in names]


def test_a_lease_in_a_numbered_folder_belongs_to_one_replica(tmp_path: Path) -> None:
    first, second = Member(tmp_path, "first"), Member(tmp_path, "second")
    lease = first.take(NAME)
    assert lease == Lease("00001/shard-01500", 1) and second.take(NAME) is None
    assert first.leases.is_held(lease)
    assert second.leases.look().shards == {1500: lease}
    assert first.leases.offer(sub_shard_name(1500, 3, "00001"), [1]) is not None
    assert [shard for shard, _ in second.leases.look().sub_shards] == [1500]
    assert [shard for _, shard in lease_files(tmp_path / "leases")] == [1500, 1500]
    first.leases.release(lease)
    taken = second.take(NAME)
    assert taken == Lease("00001/shard-01500", 3) and not first.leases.is_held(lease)


def test_a_folder_is_there_while_it_holds_leases(tmp_path: Path) -> None:
    """It may be removed in the moment in which another replica makes a lease in it."""
    member = Member(tmp_path, "member")
    folder = tmp_path / "leases" / "00001"
    neighbour = member.take(shard_name(1501, "00001"))
    member.take(NAME)
    member.leases.forget_shard(1500, "00001")
    assert [path.name for path in folder.iterdir()] == [Path(neighbour.file_name).name]
    member.leases.forget_shard(1501, "00001")
    assert not folder.exists()
    assert not member.leases.is_held(neighbour)
    assert member.take(NAME) == Lease(NAME, 1)


def test_a_look_costs_a_listing_of_each_folder(tmp_path: Path) -> None:
    member = Member(tmp_path, "member")
    num_files = member.leases.look().num_files
    member.take(NAME)
    member.take(shard_name(5, "00000"))
    assert member.leases.look().num_files == num_files + 2 * (1000 + 1) + 2


def test_replicas_take_shards_of_every_folder_once(tmp_path: Path) -> None:
    both = queues(tmp_path, manifest(layout_info(NUM_SHARDS) | {SHARDS_PER_LEASE_FOLDER: 1000}), "a", "b")
    for queue in both:
        for shard in set(range(NUM_SHARDS)) - {0, 1000, 1001, 2400}:
            queue._open.discard(shard)
    taken = [queue.take() for queue in (*both, *both)]
    assert [leased.shard for leased in taken if leased] == [0, 1000, 1001, 2400]
    assert all(queue.take() is None for queue in both)
    assert {name: len(found) for name, found in listings(tmp_path / "leases").items() if name} == {
        "00000": 1, "00001": 2, "00002": 1,
    }  # fmt: skip
    sub_shard = both[0].offer(taken[0], [0], 1)
    assert sub_shard == "00000/subshard-00000-00001"
    leased = both[1].take()
    assert leased is not None and leased.rows == (0,)
    both[1].finished(leased)
    both[0].look()
    assert both[0].is_gone(sub_shard)


def test_heartbeats_of_many_replicas_lie_in_numbered_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_folders, "MAX_REPLICAS_PER_FOLDER", 2)
    leases = tmp_path / "leases"
    members = []
    for _ in range(5):
        member = Membership(tmp_path, silent_after_s=60.0)
        member.join()
        members.append(member)
    assert [name.rpartition(".")[2] for name in (member.replica for member in members[2:])] == [
        "00001", "00001", "00002",
    ]  # fmt: skip
    assert sorted(member.replica for member in members) == replicas_in(leases)
    members[4].show_waiting(True)
    view = members[0].leases.look()
    assert (view.num_replicas, view.num_waiting) == (5, 1)
    for member in members[1:]:
        assert members[0].watch.is_at_work(member.replica)
    members[4].leave()
    assert members[0].leases.look().num_waiting == 0 and len(members[0].others()) == 3
    members[0].leave()
    assert placed(leases, "next") == "next"
    for member in members[1:4]:
        member.leave()
    assert replicas_in(leases) == []


def test_what_a_killed_replica_left_in_numbered_folders_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Member(tmp_path, "first")
    gone = Member(tmp_path, "gone.00007")
    gone.membership.show_waiting(True)
    first.take(NAME)
    half_made = tmp_path / "leases" / "00001" / "shard-01501.00001.tag.tmp"
    half_made.write_text("")
    beat = gone.membership.heartbeat._beat.process
    monkeypatch.setattr(type(beat), "is_alive", lambda process: False)
    first.membership.tidy()
    assert not half_made.exists() and replicas_in(tmp_path / "leases") == ["first"]
    assert list((tmp_path / "leases" / "replicas-00007").iterdir()) == []
