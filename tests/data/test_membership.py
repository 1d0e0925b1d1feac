"""What replicas leave behind when they leave, whatever others do at that moment."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from specdist.data.leases.heartbeat import beat_path
from specdist.data.leases.leases import Lease
from specdist.data.leases.membership import SETUP, SILENCES_KEPT, Membership
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


def test_a_replica_need_not_wait_for_its_turn_to_change_nothing(tmp_path: Path) -> None:
    first, second = Member(tmp_path, "first"), Member(tmp_path, "second")
    with first.membership.setup(lambda: True) as is_turn:
        assert is_turn and not first.membership.another_has_tidied()
    with second.membership.setup(lambda: True) as is_turn:
        assert not is_turn
    assert second.leases.latest()[SETUP] == Lease(SETUP, 2)
    with second.membership.setup(lambda: False) as is_turn:
        assert is_turn
    # The one that tidied has left: what crashes have left is looked for anew.
    first.membership.leave()
    with second.membership.setup(lambda: True) as is_turn:
        assert is_turn


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_replica_waits_for_one_that_holds_the_setup(tmp_path: Path, moment: str) -> None:
    """It may be deleting what the other has just seen."""
    first, holder, joining = (Member(tmp_path, name) for name in ("first", "holder", "joining"))
    with first.membership.setup():
        first.membership.another_has_tidied()

    def take() -> bool:
        return holder.membership.take_setup(holder.leases.look()) is not None

    if moment == "before":
        assert take()
    needless = (lambda: True) if moment == "before" else take
    assert not joining.membership.is_settled(needless)


def test_heartbeats_of_machines_that_vanished_long_ago_are_removed(tmp_path: Path) -> None:
    """By the file server's clock; not that of one whose lease nobody has taken over, or that beat lately."""
    leaving = Member(tmp_path, "leaving")
    long_ago = time.time() - (SILENCES_KEPT + 1) * SILENT_AFTER_S
    for name in ("late", "vanished", "holder"):
        member = Member(tmp_path, name)
        member.membership.show_waiting(True)
        if name == "holder":
            assert member.take("shard-00000") is not None
        if name != "late":
            os.utime(beat_path(tmp_path / "leases", name), (long_ago, long_ago))
    leaving.membership.leave()
    assert names(tmp_path) == [
        "holder.beat", "holder.waiting", "late.beat", "late.waiting", "shard-00000.00001",
    ]  # fmt: skip


@pytest.mark.parametrize(("num_files", "num_reads"), [(10, 0), (10, 5), (10, 20), (10, 2000), (45_000, 2)])
def test_a_replica_that_waits_reads_and_lists_so_much_per_second_and_still_sees_silence(
    tmp_path: Path, num_files: int, num_reads: int
) -> None:
    """A look at a lease may be a read of its file and one of a heartbeat."""
    waits_s = [
        Membership(tmp_path, silent_after_s=60.0).poll_s(num_files, num_reads=num_reads) for _ in range(50)
    ]
    assert max(waits_s) < 60.0 / 2
    assert num_reads > 20 or 2 * num_reads < 3.2 * min(waits_s)
    assert num_files / 1000 < 3 * min(waits_s)
