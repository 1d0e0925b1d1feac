"""The next shard of a replica: neither complete nor claimed by another replica that is at work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specdist.data.claims import Claim, View, claims_of_shards, shard_name
from specdist.data.files import writing
from specdist.data.manifest import Manifest, check_same
from specdist.data.membership import Membership
from specdist.data.parts import PartLog
from specdist.data.run_folder import RunFolder
from specdist.data.shard_choice import FEW_REPLICAS, first_choices, watched
from specdist.utils.errors import UserError

# Of shards that turn out to be complete or claimed, until a replica looks anew; and of looks per attempt.
MAX_LATE, MAX_LOOKS = 2, 8
# Watched claims change after so many times the silence after which a replica counts as gone.
PERIOD_IN_SILENCES = 2.5
# Completion records are listed at most so often that a replica reads this many names per second.
RECORDS_PER_S = 500.0


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
        self._membership = membership
        self._claims = membership.claims
        self._manifest = manifest
        self._open = dict.fromkeys(range(num_shards))
        self._mine: dict[int, Claim] = {}
        self._next_listing_at = -math.inf
        # As last seen, and the claims watched since.
        self._view = View({}, num_replicas=1, num_waiting=0, num_files=0)
        self._num_watched = 0
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
            taken = self._take()
            self._membership.show_waiting(taken is None and not self.is_done and not self._mine)
            return taken

    def _take(self) -> ClaimedShard | None:
        for _ in range(MAX_LOOKS):
            view = self._claims.look()
            self._view = view
            claims = claims_of_shards(view.latest)
            if view.num_replicas <= FEW_REPLICAS:
                return self._take_first(claims)
            is_out_of_date, taken = self._take_unclaimed(claims)
            if taken is not None:
                return taken
            if not is_out_of_date:
                return self._take_abandoned(claims)
        return None

    def _take_first(self, claims: Mapping[int, Claim]) -> ClaimedShard | None:
        """The first shard that can be had, among few replicas."""
        others = self._open_elsewhere()
        self._num_watched = sum(shard in claims for shard in others)
        for shard in others:
            latest = claims.get(shard)
            if latest is None and self._see_complete(shard):
                continue
            if (taken := self._claim(shard, latest)) is not None:
                return taken
        return None

    def _take_unclaimed(self, claims: Mapping[int, Claim]) -> tuple[bool, ClaimedShard | None]:
        """A shard without a claim; and if there is none, whether to look again, since others were faster."""
        num_late = 0
        for shard in first_choices(self._open_elsewhere(), claims.keys(), self._view.num_replicas):
            if shard not in self._open:
                continue
            if not self._see_complete(shard) and (taken := self._claim(shard, None)) is not None:
                return False, taken
            num_late += 1
            if num_late == MAX_LATE:
                return self._see_listed(are_none_claimed=not claims), None
        return False, None

    def _take_abandoned(self, claims: Mapping[int, Claim]) -> ClaimedShard | None:
        """A shard whose holder released it or is gone."""
        others = [shard for shard in self._open_elsewhere() if shard in claims]
        now = self._membership.clock()
        period = int(now // (PERIOD_IN_SILENCES * self._membership.silent_after_s))
        chosen = watched(others, self._view.num_waiting, replica=self._membership.replica, period=period)
        self._num_watched = len(chosen)
        for shard in chosen:
            taken = self._claim(shard, claims[shard])
            if taken is not None:
                return taken
        return None

    def _claim(self, shard: int, latest: Claim | None) -> ClaimedShard | None:
        """Claim a shard; None if another replica holds it, or has completed it."""
        name = shard_name(shard)
        above = max(self._folder.log_generations(shard), default=0) if latest is None else 0
        claim = self._claims.take(name, latest, above=above)
        if claim is None:
            return None
        # Another may have completed it and dropped its claims after they were read.
        if self._folder.complete_from_attempts(shard) or self._folder.is_complete(shard):
            self._folder.sweep(shard)
            self._claims.forget(name)
            self._see_complete(shard)
            return None
        self._check_run()
        self._mine[shard] = claim
        return ClaimedShard(shard, claim)

    def _see_listed(self, *, are_none_claimed: bool) -> bool:
        """See at once all shards that have a completion record; False if that was done so lately that listing
        them again would cost the file server more than it tells. At the end, without claims, it is done."""
        now = self._membership.clock()
        if not are_none_claimed and now < self._next_listing_at:
            return False
        recorded = self._folder.recorded_shards(self._open)
        self._next_listing_at = now + len(recorded) / RECORDS_PER_S
        for shard in self._open_elsewhere():
            if shard in recorded:
                self._complete_elsewhere(shard)
        return True

    def _open_elsewhere(self) -> list[int]:
        """The shards that are not known to be complete, without those of this replica."""
        return [shard for shard in self._open if shard not in self._mine]

    @property
    def poll_s(self) -> float:
        """Seconds to wait after :meth:`take` found nothing."""
        return self._membership.poll_s(self._view.num_files, num_reads=self._num_watched)

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
        self._complete_elsewhere(shard)
        return True

    def _complete_elsewhere(self, shard: int) -> None:
        del self._open[shard]
        self.on_done_elsewhere(shard)

    def _check_run(self) -> None:
        """A replica that was paused must not write into a run that replaced its own."""
        try:
            check_same(self._folder.manifest, self._manifest)
        except UserError as error:
            raise UserError(f"the run in this folder has been replaced by another. {error}") from error
