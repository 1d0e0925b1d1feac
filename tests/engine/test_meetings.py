"""When the draft of several groups waits for another one, on a clock of the test's own."""

from __future__ import annotations

import pytest

from specdist.engine.meetings import Meetings


def simulated(away: list[float], burst: dict[int, float], num_rounds: int = 60) -> tuple[float, int, float]:
    """Seconds of a round, once it is steady, of groups that are so long away; the groups in the last burst;
    and the longest that one group has waited while the draft did nothing."""
    meetings, now, free_at = Meetings(), 0.0, 0.0
    asks_at = dict(enumerate(away))
    asked: set[int] = set()
    served: list[tuple[float, int]] = []
    longest = 0.0
    while len(served) < num_rounds * len(away):
        for group, moment in asks_at.items():
            if group not in asked and moment <= now:
                asked.add(group)
                meetings.asked(group, now)  # while it is at work the draft reads nothing
        until = meetings.hold_until(now)
        if now < free_at or not asked or until > now:
            moments = [moment for group, moment in asks_at.items() if group not in asked]
            moments += [free_at] if now < free_at else []
            moments += [until] if asked and until > now else []
            now = min(moment for moment in moments if moment > now)
            continue
        longest = max(longest, *(now - max(asks_at[group], free_at) for group in asked))
        for group in asked if served else ():
            meetings.was_away(group, away[group])
        free_at = now + burst[len(asked)]
        meetings.served(asked, now, now, free_at)
        served += [(now, len(asked))] * len(asked)
        for group in asked:
            asks_at[group] = now + away[group]
        asked = set()
    half = served[len(served) // 2 :]
    rounds = (half[-1][0] - half[0][0]) / (len(half) / len(away))
    return rounds, served[-1][1], longest


@pytest.mark.parametrize(
    ("away", "burst", "expected", "size"),
    [
        # Together a round takes as long as a group's own pass; one after the other, as long as two bursts.
        ([20.0, 20.0], {1: 15.0, 2: 17.0}, 20.0, 2),
        # The draft has time for a burst of each.
        ([20.0, 20.0], {1: 8.0, 2: 9.0}, 20.0, 1),
        # A burst for both is as long as two: nothing is gained.
        ([20.0, 20.0], {1: 15.0, 2: 30.0}, 30.0, 1),
        # Three, of which two can meet in the time of a pass.
        ([20.0, 21.0, 20.5], {1: 14.0, 2: 15.0, 3: 16.0}, 21.0, 3),
    ],
)
def test_groups_meet_where_that_makes_rounds_shorter(
    away: list[float], burst: dict[int, float], expected: float, size: int
) -> None:
    round_s, found, longest = simulated(away, burst)
    assert round_s == pytest.approx(expected, rel=0.06)
    assert found == size or size == 1
    assert longest <= burst[1] + 1e-9, "no group waits for another for longer than a burst"


def test_nobody_waits_for_a_group_that_does_not_come() -> None:
    meetings = Meetings()
    for group in (0, 1):
        meetings.served([group], 0.0, 0.0, 15.0)
        meetings.was_away(group, 20.0)
    meetings.served([0, 1], 20.0, 20.0, 37.0)
    meetings.asked(0, 40.0)
    assert meetings.hold_until(40.0) > 40.0
    # A quarter later than usual, and after it has left.
    assert meetings.hold_until(46.0) <= 46.0
    meetings.left(1)
    assert meetings.hold_until(40.0) <= 40.0


def test_a_group_that_comes_later_than_a_burst_takes_is_not_waited_for() -> None:
    """Three groups, of which two in a burst would be best."""
    meetings = Meetings()
    meetings.served([0, 1], 0.0, 0.0, 16.0)
    meetings.served([2], 16.0, 16.0, 31.0)
    for group in range(3):
        meetings.was_away(group, 40.0)
    meetings.served([0, 1], 56.0, 56.0, 72.0)
    meetings.asked(2, 56.0)
    assert meetings.hold_until(72.0) == 72.0, "the others are away until 96"
