"""What replicas leave behind when they leave, whatever others do at that moment."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from specdist.data.leases.leases import Lease
from specdist.data.leases.membership import SETUP, Membership
from tests.data.replicas import SILENT_AFTER_S, Member


def names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "leases").iterdir())


def set_up(member: Membership) -> None:
    with member.setup():
        pass


def test_a_setup_that_another_replica_has_begun_stays(tmp_path: Path) -> None:
    """The other holds the lease, or has just looked at it, or has just come."""
    for moment in ("holds", "comes"):
        output = tmp_path / moment
        leaving = Member(output, "leaving")
        set_up(leaving.membership)
        if moment == "holds":
            joining = Member(output, "joining")
            with joining.membership.setup():
                leaving.membership.leave()
                assert joining.leases.is_held(Lease(SETUP, 3))
        else:
            take, joined = leaving.leases.take, []

            def take_while_another_comes(*given, output=output, take=take, joined=joined):
                joined.append(Member(output, "joining"))
                return take(*given)

            leaving.leases.take = take_while_another_comes
            leaving.membership.leave()
            (joining,) = joined
        assert any(name.startswith("setup.") for name in names(output)), moment
        set_up(joining.membership)
        joining.membership.leave()
        assert names(output) == []


def test_a_replica_whose_view_predates_the_removal_looks_again(tmp_path: Path) -> None:
    """Otherwise it would take the next number while another takes the first: two would hold the setup."""
    late, other = Member(tmp_path, "late"), Member(tmp_path, "other")
    set_up(other.membership)
    seen, taken = late.leases.latest()[SETUP], []
    is_free = late.leases._is_free

    def is_free_until_all_is_removed(lease: Lease) -> bool:
        found = is_free(lease)
        (tmp_path / "leases" / lease.file_name).unlink()
        taken.append(other.leases.take(SETUP, None))
        return found

    late.leases._is_free = is_free_until_all_is_removed
    assert late.leases.take(SETUP, seen) is None
    assert taken == [Lease(SETUP, 1)] and other.leases.is_held(taken[0])


def test_replicas_that_come_and_go_at_once_share_one_setup_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    inside, failures = [0], []

    def come_and_go(number: int) -> None:
        try:
            for visit in range(15):
                member = Membership(tmp_path, silent_after_s=60.0, name=f"replica{number}-{visit}")
                member._poll_s = 0.0005
                member.join()
                with member.setup():
                    inside[0] += 1
                    assert inside[0] == 1
                    inside[0] -= 1
                member.leave()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not failures
    assert names(tmp_path) == []


def test_heartbeats_of_replicas_that_fell_silent_are_removed(tmp_path: Path) -> None:
    """Not that of one whose lease nobody has taken over, or that beat meanwhile."""
    leaving = Member(tmp_path, "leaving")
    members = {name: Member(tmp_path, name) for name in ("late", "vanished", "holder")}
    assert members["holder"].take("shard-00000") is not None
    for _ in range(4):
        leaving.membership.tidy()
        leaving.clock.now += SILENT_AFTER_S / 3
        members["late"].beat()
    leaving.membership.leave()
    assert names(tmp_path) == ["holder.beat", "late.beat", "shard-00000.00001"]


@pytest.mark.parametrize("num_files", [10, 4_000, 45_000])
def test_a_replica_that_waits_lists_so_much_per_second_and_still_sees_silence(
    tmp_path: Path, num_files: int
) -> None:
    waits_s = [Membership(tmp_path, silent_after_s=60.0).poll_s(num_files) for _ in range(50)]
    assert max(waits_s) < 60.0 / 2
    assert num_files / 1000 < 3 * min(waits_s)
