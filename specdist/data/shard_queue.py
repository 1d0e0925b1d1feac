"""The next shard of a replica: the first that is neither complete nor claimed by another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdist.data.claims import Claim
from specdist.data.files import writing
from specdist.data.manifest import Manifest, check_same
from specdist.data.membership import Membership
from specdist.data.parts import PartLog
from specdist.data.run_folder import RunFolder
from specdist.utils.errors import UserError


@dataclass(frozen=True)
class ClaimedShard:
    """A shard of this replica, and the claim with which it is finished or released."""

    shard: int
    claim: Claim


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
        self._claims = membership.claims
        self._manifest = manifest
        self._open = dict.fromkeys(range(num_shards))
        self._mine: dict[int, Claim] = {}
        self.on_done_elsewhere = on_done_elsewhere

    @property
    def is_done(self) -> bool:
        """Whether all shards are known to be complete."""
        return not self._open

    def take(self) -> ClaimedShard | None:
        """Claim a shard; None if all others are claimed or complete.

        Raises :class:`UserError` if the folder now holds another run, or cannot be written.
        """
        with writing(self._folder.path):
            return self._take()

    def _take(self) -> ClaimedShard | None:
        latest = self._claims.latest()
        for shard in list(self._open):
            if shard in self._mine:
                continue
            name = f"shard-{shard:05d}"
            if name not in latest and self._see_complete(shard):
                continue
            above = max(self._folder.log_generations(shard), default=0) if name not in latest else 0
            claim = self._claims.take(name, latest.get(name), above=above)
            if claim is None:
                continue
            # Another may have completed it and dropped its claims after they were read.
            if self._folder.complete_from_attempts(shard) or self._folder.is_complete(shard):
                self._folder.sweep(shard)
                self._claims.forget(name)
                self._see_complete(shard)
                continue
            self._check_run()
            self._mine[shard] = claim
            return ClaimedShard(shard, claim)
        return None

    def log(self, claimed: ClaimedShard, rows: range | None = None) -> PartLog:
        """The part log of this claim, with the rows of earlier ones that are among the shard's ``rows``."""
        return self._folder.parts(claimed.shard, claimed.claim.generation, rows)

    def is_held(self, claimed: ClaimedShard) -> bool:
        """Whether the claim is still in force. Raises :class:`UserError` as :meth:`take` does."""
        self._check_run()
        with writing(self._folder.path):
            return self._claims.is_held(claimed.claim)

    def finished(self, claimed: ClaimedShard) -> None:
        """Remove the claims of a complete shard."""
        self._mine.pop(claimed.shard, None)
        self._open.pop(claimed.shard, None)
        with writing(self._folder.path):
            self._claims.forget(claimed.claim.name)

    def lost(self, claimed: ClaimedShard) -> None:
        """Forget a shard that another replica took over; it can be claimed again if that replica is lost too.

        If the other completed it, it may have died before it removed the claims.
        """
        self._mine.pop(claimed.shard, None)
        if self._folder.is_complete(claimed.shard):
            self._claims.forget(claimed.claim.name)

    def give_back(self) -> None:
        """Release all claims of this replica."""
        for claim in self._mine.values():
            self._claims.release(claim)
        self._mine.clear()

    def _see_complete(self, shard: int) -> bool:
        if not self._folder.is_complete(shard):
            return False
        del self._open[shard]
        self.on_done_elsewhere(shard)
        return True

    def _check_run(self) -> None:
        """A replica that was paused must not write into a run that replaced its own."""
        try:
            check_same(self._folder.manifest, self._manifest)
        except UserError as error:
            raise UserError(f"the run in this folder has been replaced by another. {error}") from error
