"""When a draft that serves several target groups waits for another one, so that one burst serves both.

A burst for two groups takes hardly longer than one for a single group while its passes are bound by reading
the weights. Groups that ask one after the other have a burst each, and where these together take longer than
a group's own pass, all wait for them. So from the times of bursts and of groups between a reply and the next
request it is worked out how many groups a burst should serve: with B bursts a round takes as long as the
longer of a group's own part and all B bursts. If too few have asked, the draft waits for the next that is
expected, at most as long as a burst takes. It changes when a group is served, and no token.

A draft that has worked ahead replies to a group at once, and only then does the next work ahead. So groups
need not ask at the same time for one burst to serve all: whose reply has gone out is away for as long as its
pass takes, and the burst may begin so much later that it ends when that group asks again.

No clock of its own: times are given, in seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

MEMORY = 0.8
# A group that is this much later than usual has other things to do.
LATEST = 1.25
# Of the time that a group is away, and of a burst: by so much they differ from one time to the next.
SPREAD = 0.1
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
        # Groups whose replies have gone out before the burst.
        self._owed: set[int] = set()
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

    def replied(self, group: int, now: float) -> None:
        """Its reply has gone out; the work ahead for it comes later."""
        self._waiting.pop(group, None)
        self._groups.setdefault(group, _Group(now)).replied_at = now
        self._owed.add(group)

    def served(self, groups: Collection[int], begin: float, replied: float, end: float) -> None:
        """A burst for these: the work before their replies, if there is any, and the work ahead."""
        self._owed.difference_update(groups)
        self._bursts.setdefault(len(groups), _Mean()).add(end - begin)
        self._before_reply.add(replied - begin)
        self._free_at = end

    def left(self, group: int) -> None:
        self._groups.pop(group, None)
        self._waiting.pop(group, None)
        self._owed.discard(group)

    def hold_until(self, now: float) -> float:
        """The moment until which to wait for one more group; ``now``, or earlier, for a burst at once: for
        those that have had their replies, or else for those that have asked."""
        coming = sorted(
            group.expected_at
            for number, group in self._groups.items()
            if number not in self._waiting
            and number not in self._owed
            and group.away.is_known
            and now < group.replied_at + LATEST * group.away.value
        )
        if not coming or not self._bursts:
            return now
        if self._owed:
            return self._hold_work_until(now, coming)
        if not self._waiting:
            return now
        size = self._best_size(len(self._waiting) + len(coming))
        if len(self._waiting) >= size:
            return now
        # The last of those that make the burst large enough. It may be late.
        expected = coming[size - len(self._waiting) - 1]
        latest = max(min(self._waiting.values()), self._free_at) + self._burst(1)
        return latest if expected <= latest else now

    def _hold_work_until(self, now: float, coming: list[float]) -> float:
        """As :meth:`hold_until`, for work ahead of groups that are away. ``coming``: when the others are
        expected."""
        due = [
            group.expected_at - SPREAD * group.away.value
            for number in self._owed
            if (group := self._groups[number]).away.is_known
        ]
        if not due:
            return now
        # Where that makes nobody late, together: the policy then has all of a pass for one burst, not a part
        # of it for each of several.
        num_joining = min(
            range(len(coming) + 1), key=lambda count: (self._delays(now, due, coming, count), -count)
        )
        if not num_joining:
            return now
        # Until it would be late for those that are away; else the last to join may be a little late.
        latest = min(due) - self._burst(len(self._owed) + num_joining)
        return min(min(due), max(latest, coming[num_joining - 1] + SPREAD * self._burst(1)))

    def _delays(self, now: float, due: list[float], coming: list[float], num_joining: int) -> float:
        """By how much all groups together are late if the first so many of those that come join the burst,
        and the others have the next one together."""
        begin = max([now, *coming[:num_joining]])
        end = begin + self._burst(len(due) + num_joining)
        late = sum(max(0.0, end - moment) for moment in due)
        others = coming[num_joining:]
        if others:
            late += sum(max(0.0, end - moment) for moment in others)
            end_of_next = max(end, others[-1]) + self._burst(len(others))
            late += sum(max(0.0, end_of_next - max(moment, end)) for moment in due)
        return late

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
