"""When there is time for work beside the rounds, on a clock of the test's own."""

from __future__ import annotations

from specdist.engine.spare_time import DUE_PLACE, LATE_SHARE, NUM_WAITS, SpareTime


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def waited(seconds: float, rounds: int = 2 * NUM_WAITS) -> tuple[SpareTime, Clock]:
    """After rounds whose messages came after this time, and twice that in every second one."""
    clock = Clock()
    spare = SpareTime(clock)
    for index in range(rounds):
        spare.begin()
        clock.now += seconds * (1 + index % 2)
        spare.end(clock.now, is_late=False)
        clock.now += seconds
    return spare, clock


def test_a_message_is_due_when_nearly_all_took_longer() -> None:
    assert SpareTime().due_s == 0
    assert waited(0.01, DUE_PLACE)[0].due_s == 0, "too little is known"
    assert abs(waited(0.01)[0].due_s - 0.01) < 1e-9


def test_work_ends_before_a_message_is_due() -> None:
    spare, clock = waited(0.01)
    spare._late_s = LATE_SHARE * spare._all_s  # nothing that could let a message wait is left
    spare.begin()
    assert spare.may_take(0.009)
    clock.now += 0.005
    assert spare.may_take(0.004) and not spare.may_take(0.006)
    clock.now += 0.006
    assert not spare.may_take(0.001)


def test_in_a_long_wait_there_is_time_again() -> None:
    """As much as a small part of what has been waited."""
    spare, clock = waited(0.01)
    spare._late_s = LATE_SHARE * spare._all_s
    spare.begin()
    chance_s = spare.next_chance_s(0.005)
    assert 0.3 < chance_s < 1
    clock.now += 0.9 * chance_s
    assert not spare.may_take(0.005)
    clock.now += 0.11 * chance_s
    assert spare.may_take(0.005)


def test_messages_that_had_to_wait_are_paid_back() -> None:
    spare, clock = waited(0.01)
    spare.begin()
    clock.now += 0.1
    spare.end(clock.now - 0.09, is_late=True)
    spare.begin()
    assert not spare.may_take(1e-6)
    num_rounds = 0
    while not spare.may_take(1e-6):
        clock.now += 0.01
        spare.end(clock.now, is_late=False)
        clock.now += 0.01
        spare.begin()
        num_rounds += 1
    # The lost 0.09 s are a share of so much time.
    assert 0.02 * num_rounds > 0.5 * 0.09 / LATE_SHARE or num_rounds > 200
