"""When a draft that serves several target groups waits for another one, so that one burst serves both.

A burst for two groups takes hardly longer than one for a single group while its passes are bound by reading
the weights. Groups that ask one after the other have a burst each, and where these together take longer than
a group's own pass, all wait for them. So from the times of bursts and of groups between a reply and the next
request it is worked out how many groups a burst should serve: with B bursts a round takes as long as the
longer of a group's own part and all B bursts. If too few have asked, the draft waits for the next that is
expected, at most as long as a burst takes. It changes when a group is served, and no token.

No clock of its own: times are given, in seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

MEMORY = 0.8
# A group that is this much later than usual has other things to do.
LATEST = 1.25
# Of a round; a smaller gain is not worth waiting for anybody.
WORTH_WAITING = 0.97


@dataclass
class _Mean:
    """A decaying mean."""

    value: float = 0.0
    is_known: bool = False

    def add(self, value: float) -> None:
        self.value = MEMORY * self.value + (1 - MEMORY) * value if self.is_known else value
        self.is_known = True


@dataclass
class _Group:
    replied_at: float
    away: _Mean = field(default_factory=_Mean)

    @property
    def expected_at(self) -> float:
        return self.replied_at + self.away.value


class Meetings:
    """Of the groups that one draft serves, by number."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._waiting: dict[int, float] = {}
        # By the number of groups: a burst, and its part before the reply.
        self._bursts: dict[int, _Mean] = {}
        self._before_reply = _Mean()
        self._free_at = 0.0

    def asked(self, group: int, now: float) -> None:
        """Its request has been read; it may have come before, while the draft was at work."""
        self._waiting[group] = now

    def was_away(self, group: int, seconds: float) -> None:
        """From a reply to its next request, by the group's own clock."""
        if group in self._groups:
            self._groups[group].away.add(seconds)

    def served(self, groups: Collection[int], begin: float, replied: float, end: float) -> None:
        """A burst for these."""
        for group in groups:
            self._waiting.pop(group, None)
            self._groups.setdefault(group, _Group(replied)).replied_at = replied
        self._bursts.setdefault(len(groups), _Mean()).add(end - begin)
        self._before_reply.add(replied - begin)
        self._free_at = end

    def left(self, group: int) -> None:
        self._groups.pop(group, None)
        self._waiting.pop(group, None)

    def hold_until(self, now: float) -> float:
        """The moment until which to wait for one more group; ``now``, or earlier, for serving those that have
        asked."""
        coming = sorted(
            group.expected_at
            for number, group in self._groups.items()
            if number not in self._waiting
            and group.away.is_known
            and now < group.replied_at + LATEST * group.away.value
        )
        if not coming or not self._waiting or not self._bursts:
            return now
        size = self._best_size(len(self._waiting) + len(coming))
        if len(self._waiting) >= size:
            return now
        # The last of those that make the burst large enough. It may be late.
        expected = coming[size - len(self._waiting) - 1]
        latest = max(min(self._waiting.values()), self._free_at) + self._burst(1)
        return latest if expected <= latest else now

    def _best_size(self, num_groups: int) -> int:
        """Of a burst."""
        away = max(group.away.value for group in self._groups.values())
        own = away + self._before_reply.value
        rounds: dict[int, float] = {}
        for num_bursts in range(num_groups, 0, -1):
            size = -(-num_groups // num_bursts)
            rounds.setdefault(size, max(own, num_bursts * self._burst(size)))
        alone = rounds[1]
        best = min(rounds, key=lambda size: (rounds[size], size))
        return best if rounds[best] < WORTH_WAITING * alone else 1

    def _burst(self, num_groups: int) -> float:
        """Seconds; of a number that has not been seen, as long as one for the nearest that has."""
        nearest = min(self._bursts, key=lambda known: (abs(known - num_groups), known))
        return self._bursts[nearest].value
