"""The next shard of a replica: neither complete nor leased by another replica that is at work.

While replicas wait for one, those that hold shards offer *sub-shards*: rows that they have not begun. A
sub-shard is leased like a shard; its holder logs the rows and removes the lease, and the shard's holder
publishes them. Rows of a sub-shard that is gone without having been finished are the shard's again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from specdist.data.leases.leases import (
    Lease,
    View,
    shard_and_sub_shard,
    shard_name,
    sub_shard_name,
)
from specdist.data.leases.membership import Membership
from specdist.data.run.manifest import Manifest
from specdist.data.run.parts import PartLog
from specdist.data.run.run_folder import RunFolder
from specdist.data.run.segments import check_continues
from specdist.data.store.files import writing
from specdist.utils.errors import UserError


@dataclass(frozen=True)
class LeasedShard:
    """A shard of this replica, or the ``rows`` of a sub-shard of one, and the lease with which it is finished
    or released."""

    shard: int
    lease: Lease
    sub_shard: int | None = None
    rows: tuple[int, ...] | None = None


class ShardQueue:
    """The shards of a run as one of its replicas sees them."""

    def __init__(
        self,
        folder: RunFolder,
        membership: Membership,
        manifest: Manifest,
        num_shards: int,
        *,
        on_done_elsewhere: Callable[[int], None] = lambda shard: None,
    ) -> None:
        """``manifest``: this replica's, which the folder must keep. ``on_done_elsewhere``: called with every
        shard that another replica completed."""
        self._folder = folder
        self._membership = membership
        self._leases = membership.leases
        self._manifest = manifest
        # The shards that are not known to be complete.
        self._open = set(range(num_shards))
        self._mine: dict[int, Lease] = {}
        self._my_sub_shards: dict[str, LeasedShard] = {}
        # The leases as last seen.
        self._view = View({}, num_replicas=1, num_waiting=0, num_files=0)
        self.on_done_elsewhere = on_done_elsewhere

    @property
    def is_done(self) -> bool:
        """Whether all shards are known to be complete."""
        return not self._open

    @property
    def is_all_mine(self) -> bool:
        """Whether this replica holds every shard that is not known to be complete."""
        return len(self._mine) >= len(self._open)

    def take(self) -> LeasedShard | None:
        """Lease a shard, or a sub-shard of one; None if all others are leased or complete.

        Raises :class:`UserError` if the folder now holds another run, or cannot be written.
        """
        with writing(self._folder.path):
            taken = self._take()
            self._membership.show_waiting(taken is None and not self.is_done)
            return taken

    @property
    def is_last_leased(self) -> bool:
        """Whether all open shards had leases when this replica looked last."""
        return all(shard in self._mine or shard in self._view.shards for shard in self._open)

    def look(self) -> View:
        """The leases in force now. Raises :class:`UserError` as :meth:`take` does."""
        self._check_run()
        with writing(self._folder.path):
            self._view = self._leases.look()
            return self._view

    @property
    def view(self) -> View:
        """The leases in force when this replica looked last."""
        return self._view

    def _take(self) -> LeasedShard | None:
        view = self._view = self._leases.look()
        elsewhere = self._open_elsewhere()
        if any(shard not in view.shards for shard in elsewhere):
            # Shards without a lease are complete, or nobody's.
            recorded = self._folder.recorded_shards()
            for shard in elsewhere:
                if shard in recorded and shard not in view.shards:
                    self._complete_elsewhere(shard)
        for shard in self._open_elsewhere():
            if (taken := self._lease(shard, view.shards.get(shard))) is not None:
                return taken
        return self._take_sub_shard(self._sub_shards())

    def _sub_shards(self) -> list[Lease]:
        """The leases of sub-shards of open shards as last seen, without those of this replica: first those
        that nobody has taken yet, else in random order, so that few replicas try the same one."""
        found = [lease for shard, lease in self._view.sub_shards
                 if shard in self._open and lease.name not in self._my_sub_shards]  # fmt: skip
        random.shuffle(found)
        return sorted(found, key=lambda lease: lease.generation > 1)

    def _take_sub_shard(self, sub_shards: Sequence[Lease]) -> LeasedShard | None:
        """The first of these sub-shards that can be had."""
        for latest in sub_shards:
            taken = self._leases.take_sub_shard(latest)
            if taken is None:
                continue
            lease, rows = taken
            place = shard_and_sub_shard(lease.name)
            assert place is not None
            shard, sub_shard = place
            if self._see_complete(shard):
                self._leases.forget(lease.name)
                continue
            self._check_run()
            leased = self._my_sub_shards[lease.name] = LeasedShard(shard, lease, sub_shard, rows)
            return leased
        return None

    def offer(self, leased: LeasedShard, rows: Sequence[int], number: int) -> str | None:
        """Offer rows of a shard to everybody as the sub-shard of this number: the name to look for in a
        :class:`View`. None if there is such a sub-shard already, or the shard is another replica's by now."""
        with writing(self._folder.path):
            offered = self._leases.offer(sub_shard_name(leased.shard, number), rows)
            if offered is None:
                return None
            if not self._leases.is_held(leased.lease):
                self._leases.forget(offered.name)
                return None
            return offered.name

    def offered(self, shard: int) -> dict[str, tuple[int, ...]]:
        """The rows of every sub-shard of a shard of this replica, by name, of which leases were last seen."""
        found = {}
        for name, lease in self._view.latest.items():
            place = shard_and_sub_shard(name)
            if place is not None and place[0] == shard and place[1] is not None:
                holding = self._leases.holding(lease)
                if holding is not None and holding.rows is not None:
                    found[name] = holding.rows
        return found

    def is_gone(self, name: str) -> bool:
        """Whether a sub-shard has no lease any more: it is finished, or was given up."""
        return name not in self._view.latest and not self._leases.is_leased(name)

    def next_sub_shard(self, shard: int) -> int:
        """A number that no sub-shard of the shard has had."""
        numbers = [log.sub_shard for log in self._folder.logs(shard) if log.sub_shard is not None]
        places = filter(None, map(shard_and_sub_shard, self._view.latest))
        numbers += [number for of_shard, number in places if of_shard == shard and number is not None]
        return max(numbers, default=0) + 1

    def _lease(self, shard: int, latest: Lease | None) -> LeasedShard | None:
        """Lease a shard; None if another replica holds it, or has completed it."""
        name = shard_name(shard)
        above = max(self._folder.log_generations(shard), default=0) if latest is None else 0
        if above and self._leases.is_leased(name):
            # Its holder has begun since the leases were read.
            return None
        lease = self._leases.take(name, latest, above=above)
        if lease is None:
            return None
        # Another may have completed it and dropped its leases after they were read.
        if self._folder.complete_from_attempts(shard) or self._folder.is_complete(shard):
            self._folder.sweep(shard)
            self._leases.forget_shard(shard)
            self._see_complete(shard)
            return None
        self._check_run()
        self._mine[shard] = lease
        return LeasedShard(shard, lease)

    def _open_elsewhere(self) -> list[int]:
        """The shards that are not known to be complete, without those of this replica, ascending."""
        return sorted(self._open - self._mine.keys())

    @property
    def poll_s(self) -> float:
        """Seconds to wait after :meth:`take` found nothing."""
        return self._membership.poll_s(self._view.num_files)

    def log(self, leased: LeasedShard, rows: Collection[int] | None = None) -> PartLog:
        """The part log of this lease, with those of ``rows`` that other logs of the shard have."""
        return self._folder.parts(leased.shard, leased.lease.generation, rows, leased.sub_shard)

    def is_held(self, leased: LeasedShard) -> bool:
        """Whether the lease is still in force. Raises :class:`UserError` as :meth:`take` does."""
        self._check_run()
        with writing(self._folder.path):
            return self._leases.is_held(leased.lease)

    def finished(self, leased: LeasedShard) -> None:
        """Remove the leases of a complete shard, or of a sub-shard whose rows are all in its log, durably."""
        with writing(self._folder.path):
            if leased.sub_shard is None:
                self._mine.pop(leased.shard, None)
                self._open.discard(leased.shard)
                self._leases.forget_shard(leased.shard)
                return
            self._my_sub_shards.pop(leased.lease.name, None)
            if self._leases.is_held(leased.lease):
                self._leases.forget(leased.lease.name)
            self._sweep_late(leased.shard)

    def lost(self, leased: LeasedShard) -> None:
        """Forget a shard, or a sub-shard, that another replica took over; it can be leased again if that
        replica is lost too.

        If the other completed it, it may have died before it removed the leases.
        """
        if leased.sub_shard is not None:
            self._my_sub_shards.pop(leased.lease.name, None)
            self._sweep_late(leased.shard)
            return
        self._mine.pop(leased.shard, None)
        if self._folder.is_complete(leased.shard):
            self._leases.forget_shard(leased.shard)

    def _sweep_late(self, shard: int) -> None:
        """Remove the log of a sub-shard if its shard was completed without it: nobody else will."""
        if self._folder.is_complete(shard):
            self._folder.sweep(shard)

    def give_back(self) -> None:
        """Release all leases of this replica."""
        for leased in self._my_sub_shards.values():
            self._leases.release(leased.lease, leased.rows)
        for lease in self._mine.values():
            self._leases.release(lease)
        self._my_sub_shards.clear()
        self._mine.clear()

    def _see_complete(self, shard: int) -> bool:
        if not self._folder.is_complete(shard):
            return False
        self._complete_elsewhere(shard)
        return True

    def _complete_elsewhere(self, shard: int) -> None:
        if shard in self._open:
            self._open.discard(shard)
            self.on_done_elsewhere(shard)

    def _check_run(self) -> None:
        """A replica that was paused must not write into a run that replaced its own."""
        try:
            check_continues(self._folder.manifest, self._manifest)
        except UserError as error:
            raise UserError(f"the run in this folder has been replaced by another. {error}") from error
