"""The next shard of a replica: neither complete nor leased by another replica that is at work."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from specdist.data.leases.leases import Lease, View, shard_name
from specdist.data.leases.membership import Membership
from specdist.data.run.manifest import Manifest, check_same
from specdist.data.run.parts import PartLog
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.files import writing
from specdist.utils.errors import UserError


@dataclass(frozen=True)
class LeasedShard:
    """A shard of this replica, and the lease with which it is finished or released."""

    shard: int
    lease: Lease


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
        # The leases in force when this replica looked last.
        self.view = View({}, num_files=0)
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
        """Lease a shard; None if all others are leased or complete.

        Raises :class:`UserError` if the folder now holds another run, or cannot be written.
        """
        with writing(self._folder.path):
            return self._take()

    def look(self) -> View:
        """The leases in force now. Raises :class:`UserError` as :meth:`take` does."""
        self._check_run()
        with writing(self._folder.path):
            self.view = self._leases.look()
            return self.view

    def _take(self) -> LeasedShard | None:
        view = self.view = self._leases.look()
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
        return None

    def _lease(self, shard: int, latest: Lease | None) -> LeasedShard | None:
        """Lease a shard; None if another replica holds it, or has completed it."""
        name = shard_name(shard)
        above = max(self._folder.log_generations(shard), default=0) if latest is None else 0
        if above and self._leases.in_force(name):
            # Its holder has begun since the leases were read.
            return None
        lease = self._leases.take(name, latest, above=above)
        if lease is None:
            return None
        # Another may have completed it and dropped its leases after they were read.
        if self._folder.complete_from_attempts(shard) or self._folder.is_complete(shard):
            self._folder.sweep(shard)
            self._leases.forget(name)
            self._complete_elsewhere(shard)
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
        return self._membership.poll_s(self.view.num_files)

    def log(self, leased: LeasedShard, rows: Collection[int] | None = None) -> PartLog:
        """The part log of this lease, with those of ``rows`` that earlier logs of the shard have."""
        return self._folder.parts(leased.shard, leased.lease.generation, rows)

    def is_held(self, leased: LeasedShard) -> bool:
        """Whether the lease is still in force. Raises :class:`UserError` as :meth:`take` does."""
        self._check_run()
        with writing(self._folder.path):
            return self._leases.is_held(leased.lease)

    def finished(self, leased: LeasedShard) -> None:
        """Remove the leases of a complete shard."""
        with writing(self._folder.path):
            self._mine.pop(leased.shard, None)
            self._open.discard(leased.shard)
            self._leases.forget(shard_name(leased.shard))

    def lost(self, leased: LeasedShard) -> None:
        """Forget a shard that another replica took over; it can be leased again if that replica is lost too.

        If the other completed it, it may have died before it removed the leases.
        """
        self._mine.pop(leased.shard, None)
        if self._folder.is_complete(leased.shard):
            self._leases.forget(shard_name(leased.shard))

    def give_back(self) -> None:
        """Release all leases of this replica."""
        for lease in self._mine.values():
            self._leases.release(lease)
        self._mine.clear()

    def _complete_elsewhere(self, shard: int) -> None:
        if shard in self._open:
            self._open.discard(shard)
            self.on_done_elsewhere(shard)

    def _check_run(self) -> None:
        """A replica that was paused must not write into a run that replaced its own."""
        try:
            check_same(self._folder.manifest, self._manifest)
        except UserError as error:
            raise UserError(f"the run in this folder has been replaced by another. {error}") from error
