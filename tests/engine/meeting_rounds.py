"""Target groups and the draft that they share as one event after another, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdist.engine.meetings import Meetings


@dataclass(frozen=True)
class Rounds:
    """Seconds of a round once it is steady; the longest that a group has waited for another while the draft
    did nothing; and the longest from a request to the beginning of its answer."""

    seconds: float
    longest_idle: float
    longest_wait: float


def simulated(
    away: Callable[[int], float],
    burst: Callable[[int], float],
    *,
    num_groups: int,
    num_rounds: int,
    replies_first: bool,
) -> Rounds:
    """As :class:`specdist.engine.draft_server.DraftServer` serves them.

    Args:
        away: of a group, from a reply to its next request.
        burst: for so many groups.
        replies_first: the reply comes before the burst, else after it.
    """
    meetings, now, free_at = Meetings(), 0.0, 0.0
    asks_at = {group: away(group) for group in range(num_groups)}
    replied_at: dict[int, float] = {}
    waiting: set[int] = set()
    sizes: list[tuple[float, int]] = []
    longest_idle = longest_wait = 0.0

    def reply(group: int, moment: float) -> None:
        if group in replied_at:
            meetings.was_away(group, asks_at[group] - replied_at[group])
        meetings.replied(group, moment)
        replied_at[group], asks_at[group] = moment, moment + away(group)

    while sum(size for _, size in sizes) < num_rounds * num_groups:
        # While it is at work the draft reads nothing.
        for group in [group for group in asks_at if now >= free_at and group not in waiting]:
            if asks_at[group] <= now:
                waiting.add(group)
                if replies_first:
                    longest_wait = max(longest_wait, now - asks_at[group])
                    reply(group, now)
                else:
                    meetings.asked(group, now)
        until = meetings.hold_until(now)
        asks_again = replies_first and any(asks_at[group] <= now for group in waiting)
        if now < free_at or not waiting or (until > now and not asks_again):
            moments = [asks_at[group] for group in asks_at if replies_first or group not in waiting]
            moments += [free_at] + ([until] if waiting else [])
            now = min(moment for moment in moments if moment > now)
            continue
        begin, free_at = now, now + burst(len(waiting))
        if not replies_first:
            longest_idle = max([longest_idle, *(now - max(asks_at[g], sizes[-1][0] if sizes else 0.0)
                                                for g in waiting)])  # fmt: skip
            longest_wait = max([longest_wait, *(now - asks_at[g] for g in waiting)])
            for group in waiting:
                reply(group, free_at)
        meetings.served(waiting, begin, begin if replies_first else free_at, free_at)
        sizes.append((free_at, len(waiting)))
        waiting = set()
    half = sizes[len(sizes) // 2 :]
    served = sum(size for _, size in half[1:])
    return Rounds((half[-1][0] - half[0][0]) * num_groups / served, longest_idle, longest_wait)
