"""Leases on shards: every step of the protocol, with clocks that the test sets."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from specdist.data.leases import heartbeat
from specdist.data.leases.heartbeat import BEATS_PER_SILENCE, Process, Watch, beat_path
from specdist.data.leases.leases import Lease
from tests.data.replicas import SILENT_AFTER_S, Member, watch_for

NAME = "shard-00000"


@pytest.fixture
def first(tmp_path):
    return Member(tmp_path, "first", start=1e6)


@pytest.fixture
def second(tmp_path):
    return Member(tmp_path, "second", start=5.0)


def lease_files(tmp_path):
    return sorted(path.name for path in (tmp_path / "leases").iterdir() if path.suffix != ".beat")


def test_a_lease_belongs_to_one_replica(tmp_path, first, second):
    lease = first.take(NAME)
    assert lease == Lease(NAME, 1)
    assert second.take(NAME) is None
    assert first.take(NAME) is None
    assert first.leases.is_held(lease)
    assert second.leases.holding(lease).replica == "first"
    assert second.take("shard-00001") == Lease("shard-00001", 1)
    assert lease_files(tmp_path) == ["shard-00000.00001", "shard-00001.00001"]


def test_the_highest_number_is_in_force(tmp_path, first, second):
    """A crash may leave the leases that one has replaced, in whatever order a folder is listed."""
    for generation in (9, 10, 8):
        (tmp_path / "leases" / Lease(NAME, generation).file_name).write_text("{}")
    assert first.leases.latest() == {NAME: Lease(NAME, 10)}
    assert first.leases.is_held(Lease(NAME, 10)) and not first.leases.is_held(Lease(NAME, 9))


def test_a_holder_with_a_heartbeat_keeps_its_lease_however_long_it_takes(first, second):
    lease = first.take(NAME)
    assert watch_for(second, 10 * SILENT_AFTER_S, NAME, beating=first) is None
    assert first.leases.is_held(lease)


def test_the_lease_of_a_silent_holder_is_taken_over(tmp_path, first, second):
    lease = first.take(NAME)
    assert watch_for(second, SILENT_AFTER_S, NAME) is None
    assert watch_for(second, 2, NAME) == Lease(NAME, 2)
    assert not first.leases.is_held(lease)
    # It wakes up: it can neither give its lease back nor renew it.
    first.beat()
    first.leases.release(lease)
    assert first.take(NAME) is None
    assert lease_files(tmp_path) == ["shard-00000.00002"]


def test_a_heartbeat_is_read_no_more_often_than_it_beats(tmp_path, first, second, monkeypatch):
    """Or replicas that wait would read those of many others for nothing; what is told stays the same."""
    read = []
    original = heartbeat._content
    monkeypatch.setattr(heartbeat, "_content", lambda path: read.append(path) or original(path))
    watch = second.membership.watch
    for _ in range(4 * int(SILENT_AFTER_S)):
        assert not watch.is_gone("first")
        second.clock.sleep(0.25)
    assert len(read) == BEATS_PER_SILENCE
    assert watch.is_gone("first") and watch.is_gone("first")
    assert len(read) == BEATS_PER_SILENCE + 1


@pytest.mark.parametrize("skew_s", [-1e9, 1e9])
def test_clocks_of_two_nodes_are_never_compared(tmp_path, skew_s):
    """Neither the clocks that processes read nor the times of files matter."""
    holder, observer = Member(tmp_path, "holder"), Member(tmp_path, "observer", start=skew_s)
    holder.take(NAME)
    path = beat_path(tmp_path / "leases", "holder")
    for _ in range(40):
        observer.clock.now += 1
        holder.beat()
        os.utime(path, (skew_s + 2e9, skew_s + 2e9))
        os.utime(tmp_path / "leases" / "shard-00000.00001", (0, 0))
        assert observer.take(NAME) is None
    os.utime(path, (2e9, 2e9))
    assert watch_for(observer, SILENT_AFTER_S + 2, NAME) == Lease(NAME, 2)


def test_an_observer_that_was_paused_observes_again_before_it_takes_over(first, second):
    """The observer itself was paused, or the file server stood still for both."""
    first.take(NAME)
    assert second.take(NAME) is None
    second.clock.now += 100 * SILENT_AFTER_S
    assert second.take(NAME) is None
    assert watch_for(second, SILENT_AFTER_S - 1, NAME) is None
    assert watch_for(second, 2, NAME) == Lease(NAME, 2)


@pytest.mark.parametrize("step_s", [0.4 * SILENT_AFTER_S, 0.6 * SILENT_AFTER_S, 3 * SILENT_AFTER_S])
def test_a_lease_is_taken_over_however_long_a_look_takes(first, second, step_s):
    """On a slow store looks may lie further apart than half the silence, and yet nobody may wait for ever for
    a replica that has vanished. One that beats between the looks keeps its lease."""
    first.take(NAME)
    assert watch_for(second, 50 * step_s, NAME, beating=first, step_s=step_s) is None
    assert watch_for(second, 2 * step_s, NAME, step_s=step_s) is None
    assert watch_for(second, 4 * step_s, NAME, step_s=step_s) == Lease(NAME, 2)


def test_the_lease_of_an_ended_process_is_taken_over_at_once(tmp_path, first, second):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    assert Process.current().is_alive() is True
    process = replace(Process.current(), pid=ended.pid)
    ended.wait()
    first.pretend(process)
    first.take(NAME)
    assert second.take(NAME) == Lease(NAME, 2)


def test_a_reused_process_number_is_not_a_sign_of_life():
    current = Process.current()
    assert replace(current, started=current.started - 1).is_alive() is False
    assert replace(current, machine="elsewhere").is_alive() is None
    assert replace(current, machine="").is_alive() is None


def test_a_stale_listing_of_the_leases_wins_no_lease(tmp_path, first, second):
    """Its number may be free again, below the one in force, as in an old listing of a folder on NFS."""
    old = first.take(NAME)
    watch_for(second, 2 * SILENT_AFTER_S, NAME)
    assert second.leases.latest()[NAME] == Lease(NAME, 2)
    second.leases.release(Lease(NAME, 2))
    third = Member(tmp_path, "third")
    assert third.take(NAME) == Lease(NAME, 4)
    first_again = Member(tmp_path, "again")
    # Since then given back and leased by the third; the stale listing has the first, which has ended.
    first_again.leases._watch = Gone()
    assert first_again.leases.take(NAME, old) is None
    assert first_again.leases.take(NAME, None) is None
    assert third.leases.is_held(Lease(NAME, 4))
    assert lease_files(tmp_path) == ["shard-00000.00004"]


class Gone(Watch):
    """Finds that every holder has ended."""

    def __init__(self):
        pass

    def is_gone(self, replica):
        return True

    def is_unchanged(self, path):
        return True


def test_only_one_of_two_simultaneous_takeovers_succeeds(tmp_path, first, second):
    first.take(NAME)
    third = Member(tmp_path, "third")
    latest = second.leases.latest()[NAME]
    for replica in (second, third):
        replica.leases._watch = Gone()
    assert second.leases.take(NAME, latest) == Lease(NAME, 2)
    assert third.leases.take(NAME, latest) is None
    assert second.leases.is_held(Lease(NAME, 2))


def test_an_unreadable_lease_expires(tmp_path, second):
    """Such as a crash leaves on a file system without hard links."""
    (tmp_path / "leases" / "shard-00000.00007").write_bytes(b"")
    assert watch_for(second, SILENT_AFTER_S, NAME) is None
    assert watch_for(second, 2, NAME) == Lease(NAME, 8)


def test_a_lease_made_anew_under_the_same_number_is_watched_by_its_new_holder(tmp_path, first, second):
    """All leases of a name may be removed and begin anew between two looks of a replica that waits."""
    assert first.take(NAME) == Lease(NAME, 1)
    assert second.take(NAME) is None
    first.leases.forget(NAME)
    third = Member(tmp_path, "third")
    assert third.take(NAME) == Lease(NAME, 1)
    # The old holder vanishes, and the new one keeps its lease; then the other way round.
    assert watch_for(second, 3 * SILENT_AFTER_S, NAME, beating=third) is None
    assert watch_for(second, 3 * SILENT_AFTER_S, NAME, beating=first) == Lease(NAME, 2)


def test_the_end_of_a_new_holder_is_noticed_while_the_old_one_lives_on(tmp_path, first, second):
    assert first.take(NAME) == Lease(NAME, 1)
    assert second.take(NAME) is None
    first.leases.forget(NAME)
    assert Member(tmp_path, "third").take(NAME) == Lease(NAME, 1)
    assert watch_for(second, 3 * SILENT_AFTER_S, NAME, beating=first) == Lease(NAME, 2)


def test_generations_continue_after_those_of_the_part_logs(first):
    assert first.take(NAME, above=5) == Lease(NAME, 6)


def test_the_heartbeat_thread_beats_until_it_is_stopped(tmp_path):
    replica = Member(tmp_path, "a")
    heartbeat, path = replica.membership.heartbeat, beat_path(tmp_path / "leases", "a")
    heartbeat._beat.silent_after_s = 0.012
    heartbeat.start()
    seen = {path.read_bytes()}
    while len(seen) < 5:
        seen.add(path.read_bytes())
    # It was deleted by mistake.
    path.unlink()
    while not path.exists():
        pass
    heartbeat.stop()
    assert not path.exists()


def test_the_setup_of_a_dead_replica_is_taken_over(first, second):
    entered = first.membership.setup()
    entered.__enter__()
    with second.membership.setup():
        assert second.clock.now >= 5 + SILENT_AFTER_S
