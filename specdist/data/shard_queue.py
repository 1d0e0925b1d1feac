"""Which shard a replica does next: the first that is neither complete nor claimed by another."""

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
    """A shard that this replica is to do, and the claim with which it is finished or given back."""

    shard: int
    claim: Claim


def claim_name(shard: int) -> str:
    return f"shard-{shard:05d}"


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
        """``manifest``: this replica's own, which the folder must keep.

        ``on_done_elsewhere``: told every shard that turns out to have been completed by another.
        """
        self._folder = folder
        self._claims = membership.claims
        self._manifest = manifest
        self._open = dict.fromkeys(range(num_shards))
        self._mine: dict[int, Claim] = {}
        self.on_done_elsewhere = on_done_elsewhere

    @property
    def is_done(self) -> bool:
        """Whether every shard was seen complete."""
        return not self._open

    def take(self) -> ClaimedShard | None:
        """Claim a shard; None if all that are left are claimed by others (or complete).

        Raises :class:`UserError` if the folder has become another run's, or cannot be written.
        """
        with writing(self._folder.path):
            return self._take()

    def _take(self) -> ClaimedShard | None:
        latest = self._claims.latest()
        for shard in list(self._open):
            if shard in self._mine:
                continue
            name = claim_name(shard)
            if name not in latest and self._see_complete(shard):
                continue
            above = max(self._folder.log_generations(shard), default=0) if name not in latest else 0
            claim = self._claims.take(name, latest.get(name), above=above)
            if claim is None:
                continue
            # Another may have completed it after the look at the claims, and dropped its own.
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
        """The part log of this claim, with the rows of those before it, which are to be of the shard's
        ``rows``."""
        return self._folder.parts(claimed.shard, claimed.claim.generation, rows)

    def is_held(self, claimed: ClaimedShard) -> bool:
        """Whether nobody has taken the shard over. Raises :class:`UserError` as :meth:`take` does."""
        self._check_run()
        with writing(self._folder.path):
            return self._claims.is_held(claimed.claim)

    def finished(self, claimed: ClaimedShard) -> None:
        """The shard is complete, and needs no claims any more."""
        self._mine.pop(claimed.shard, None)
        self._open.pop(claimed.shard, None)
        with writing(self._folder.path):
            self._claims.forget(claimed.claim.name)

    def lost(self, claimed: ClaimedShard) -> None:
        """Another has taken it over; it may come back if that one is lost in turn.

        Or another has finished it, and may have died before it dropped the claims, this one's among them.
        """
        self._mine.pop(claimed.shard, None)
        if self._folder.is_complete(claimed.shard):
            self._claims.forget(claimed.claim.name)

    def give_back(self) -> None:
        """Others may take what this replica has claimed."""
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
        """A replica that was paused must not write into the run that has replaced its own."""
        try:
            check_same(self._folder.manifest, self._manifest)
        except UserError as error:
            raise UserError(f"the run in this folder has been replaced by another. {error}") from error
