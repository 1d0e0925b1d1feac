"""When the draft of several groups waits for another one, on a clock of the test's own."""

from __future__ import annotations

import numpy as np
import pytest

from specdist.engine.meetings import Meetings
from tests.engine.meeting_rounds import simulated


@pytest.mark.parametrize(
    ("away", "burst", "ahead", "in_turns"),
    [
        # Together a round ahead takes as long as a group's own pass; one after the other, as two bursts.
        ([20.0, 20.0], {1: 15.0, 2: 17.0}, 20.0, 35.0),
        # The draft has time for a burst of each.
        ([20.0, 20.0], {1: 8.0, 2: 9.0}, 20.0, 28.0),
        # A burst for both is as long as two: nothing is gained. In turns, who has asked at the same time is
        # served at the same time.
        ([20.0, 20.0], {1: 15.0, 2: 30.0}, 30.0, 50.0),
        # Three; in turns two of them meet while the third has its pass.
        ([20.0, 21.0, 20.5], {1: 14.0, 2: 15.0, 3: 16.0}, 20.5, 36.0),
        # A burst for all takes nearly as long as a pass.
        ([20.0, 20.0, 20.0], {1: 14.0, 2: 16.5, 3: 19.0}, 20.0, 38.0),
    ],
)
def test_groups_meet_where_that_makes_rounds_shorter(
    away: list[float], burst: dict[int, float], ahead: float, in_turns: float
) -> None:
    for replies_first, expected in ((True, ahead), (False, in_turns)):
        found = simulated(
            away.__getitem__,
            burst.__getitem__,
            num_groups=len(away),
            num_rounds=60,
            replies_first=replies_first,
        )
        assert found.seconds == pytest.approx(expected, rel=0.06), replies_first
        assert found.longest_idle <= burst[1] + 1e-9, "no group waits for another for longer than a burst"
        assert found.longest_wait <= 2 * max(burst.values()) + 1e-9


def test_a_burst_ahead_begins_in_time_for_those_that_are_away() -> None:
    """Two groups whose passes differ from round to round need not ask at the same time: each has its reply at
    once, and as long as one burst serves both in time, neither waits."""
    coins = np.random.default_rng(0)
    found = simulated(
        lambda group: 20.0 + 2.0 * coins.random(),
        {1: 12.0, 2: 13.0}.__getitem__,
        num_groups=2,
        num_rounds=400,
        replies_first=True,
    )
    # The longer of the two passes would be 21.3 in the mean.
    assert found.seconds == pytest.approx(21.0, rel=0.005)


def replied(meetings: Meetings, groups: list[int], begin: float, replied: float, end: float) -> None:
    """A burst for these, which asked when it began."""
    for group in groups:
        meetings.replied(group, replied)
    meetings.served(groups, begin, replied, end)


def test_work_ahead_waits_for_a_group_that_comes_in_time() -> None:
    meetings = Meetings()
    for group in (0, 1):
        replied(meetings, [group], 0.0, 0.0, 15.0)
        meetings.was_away(group, 40.0)
    meetings.replied(0, 40.0)
    # The other one is expected at 40, too; 15 before group 0 may ask again, the burst must begin.
    assert meetings.hold_until(41.0) == pytest.approx(61.0)
    # A quarter later than usual it is not expected any more, and neither after it has left.
    assert meetings.hold_until(51.0) <= 51.0
    meetings.left(1)
    assert meetings.hold_until(41.0) <= 41.0


def test_groups_that_ask_in_turn_meet_if_that_makes_nobody_late() -> None:
    """Goodput would else draft for half of a pass, for ever."""
    meetings = Meetings()
    for group in (0, 1):
        replied(meetings, [group], 10.0 * group, 10.0 * group, 10.0 * group + 8.0)
        meetings.was_away(group, 20.0)
    meetings.replied(0, 20.0)
    assert meetings.hold_until(20.0) > 30.0


def test_nobody_waits_for_a_group_that_does_not_come() -> None:
    meetings = Meetings()
    for group in (0, 1):
        replied(meetings, [group], 0.0, 0.0, 15.0)
        meetings.was_away(group, 20.0)
    replied(meetings, [0, 1], 20.0, 20.0, 37.0)
    meetings.asked(0, 40.0)
    assert meetings.hold_until(40.0) > 40.0
    # A quarter later than usual, and after it has left.
    assert meetings.hold_until(46.0) <= 46.0
    meetings.left(1)
    assert meetings.hold_until(40.0) <= 40.0


def test_a_group_that_comes_later_than_a_burst_takes_is_not_waited_for() -> None:
    """Three groups, of which two in a burst would be best."""
    meetings = Meetings()
    replied(meetings, [0, 1], 0.0, 0.0, 16.0)
    replied(meetings, [2], 16.0, 16.0, 31.0)
    for group in range(3):
        meetings.was_away(group, 40.0)
    replied(meetings, [0, 1], 56.0, 56.0, 72.0)
    meetings.asked(2, 56.0)
    assert meetings.hold_until(72.0) == 72.0, "the others are away until 96"
