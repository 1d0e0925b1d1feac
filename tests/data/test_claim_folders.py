"""Claims and heartbeats in numbered folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdist.data.leases import claim_folders
from specdist.data.leases.claim_folders import listings, placed, replicas_in
from specdist.data.leases.claims import Claim, claim_files, shard_name, split_name
from specdist.data.leases.membership import Membership
from specdist.data.leases.shard_queue import ShardQueue
from specdist.data.run.layout import SHARDS_PER_CLAIM_FOLDER, SHARDS_PER_FOLDER, layout_info
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


def test_a_claim_in_a_numbered_folder_belongs_to_one_replica(tmp_path: Path) -> None:
    first, second = Member(tmp_path, "first"), Member(tmp_path, "second")
    claim = first.take(NAME)
    assert claim == Claim("00001/shard-01500", 1) and second.take(NAME) is None
    assert first.claims.is_held(claim)
    assert second.claims.look().shards == {1500: claim}
    assert first.claims.offer(split_name(1500, 3, "00001"), [1]) is not None
    assert [shard for shard, _ in second.claims.look().splits] == [1500]
    assert [shard for _, shard in claim_files(tmp_path / "claims")] == [1500, 1500]
    first.claims.release(claim)
    taken = second.take(NAME)
    assert taken == Claim("00001/shard-01500", 3) and not first.claims.is_held(claim)


def test_a_folder_is_there_while_it_holds_claims(tmp_path: Path) -> None:
    """It may be removed in the moment in which another replica makes a claim in it."""
    member = Member(tmp_path, "member")
    folder = tmp_path / "claims" / "00001"
    neighbour = member.take(shard_name(1501, "00001"))
    member.take(NAME)
    member.claims.forget_shard(1500, "00001")
    assert [path.name for path in folder.iterdir()] == [Path(neighbour.file_name).name]
    member.claims.forget_shard(1501, "00001")
    assert not folder.exists()
    assert not member.claims.is_held(neighbour)
    assert member.take(NAME) == Claim(NAME, 1)


def test_a_look_costs_a_listing_of_each_folder(tmp_path: Path) -> None:
    member = Member(tmp_path, "member")
    num_files = member.claims.look().num_files
    member.take(NAME)
    member.take(shard_name(5, "00000"))
    assert member.claims.look().num_files == num_files + 2 * (1000 + 1) + 2


def test_replicas_take_shards_of_every_folder_once(tmp_path: Path) -> None:
    both = queues(tmp_path, manifest(layout_info(NUM_SHARDS) | {SHARDS_PER_CLAIM_FOLDER: 1000}), "a", "b")
    for queue in both:
        for shard in set(range(NUM_SHARDS)) - {0, 1000, 1001, 2400}:
            queue._open.discard(shard)
    taken = [queue.take() for queue in (*both, *both)]
    assert [claimed.shard for claimed in taken if claimed] == [0, 1000, 1001, 2400]
    assert all(queue.take() is None for queue in both)
    assert {name: len(found) for name, found in listings(tmp_path / "claims").items() if name} == {
        "00000": 1, "00001": 2, "00002": 1,
    }  # fmt: skip
    split = both[0].offer(taken[0], [0], 1)
    assert split == "00000/split-00000-00001"
    claimed = both[1].take()
    assert claimed is not None and claimed.rows == (0,)
    both[1].finished(claimed)
    both[0].look()
    assert both[0].is_gone(split)


def test_a_run_of_an_older_version_keeps_its_claims_in_one_folder(tmp_path: Path) -> None:
    """Another replica of that version may be at work."""
    older = manifest({SHARDS_PER_FOLDER: 1000})
    first, second = queues(tmp_path, older, "a", "b")
    taken = first.take()
    assert taken is not None and taken.claim.name == "shard-00000"
    (other,) = queues(tmp_path, manifest(layout_info(NUM_SHARDS) | {SHARDS_PER_CLAIM_FOLDER: 1000}), "c")
    claimed = [other.take(), second.take()]
    assert [found.claim.name for found in claimed if found] == ["shard-00001", "shard-00002"]
    assert list(listings(tmp_path / "claims")) == [""]


def test_heartbeats_of_many_replicas_lie_in_numbered_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_folders, "MAX_REPLICAS_PER_FOLDER", 2)
    claims = tmp_path / "claims"
    members = []
    for _ in range(5):
        member = Membership(tmp_path, silent_after_s=60.0)
        member.join()
        members.append(member)
    assert [name.rpartition(".")[2] for name in (member.replica for member in members[2:])] == [
        "00001", "00001", "00002",
    ]  # fmt: skip
    assert sorted(member.replica for member in members) == replicas_in(claims)
    members[4].show_waiting(True)
    view = members[0].claims.look()
    assert (view.num_replicas, view.num_waiting) == (5, 1)
    for member in members[1:]:
        assert members[0].watch.is_at_work(member.replica)
    members[4].leave()
    assert members[0].claims.look().num_waiting == 0 and len(members[0].others()) == 3
    members[0].leave()
    assert placed(claims, "next") == "next"
    for member in members[1:4]:
        member.leave()
    assert replicas_in(claims) == []


def test_what_a_killed_replica_left_in_numbered_folders_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Member(tmp_path, "first")
    gone = Member(tmp_path, "gone.00007")
    gone.membership.show_waiting(True)
    first.take(NAME)
    half_made = tmp_path / "claims" / "00001" / "shard-01501.00001.tag.tmp"
    half_made.write_text("")
    beat = gone.membership.heartbeat._beat.process
    monkeypatch.setattr(type(beat), "is_alive", lambda process: False)
    first.membership.tidy()
    assert not half_made.exists() and replicas_in(tmp_path / "claims") == ["first"]
    assert list((tmp_path / "claims" / "replicas-00007").iterdir()) == []
