"""The stopwatch: every nanosecond is booked once, and to what was running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdist.engine import timeline
from specdist.engine.timeline import Span, Timeline


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The clock's next readings."""
    readings: list[int] = []
    monkeypatch.setattr(timeline.time, "perf_counter_ns", lambda: readings.pop(0))
    yield readings
    assert not readings, "the clock was read less often than thought"


def test_a_phase_inside_another_pauses_it(ticks: list[int]) -> None:
    ticks += [100, 110, 130, 160, 200, 250]
    clock = Timeline("host", keeps_spans=True)
    with clock.phase("idle"), clock.phase("transfer"):
        pass
    assert clock.take() == {"host": 10 + 50, "idle": 20 + 40, "transfer": 30}
    assert clock.spans == [
        Span("host", 100, 110),
        Span("idle", 110, 130),
        Span("transfer", 130, 160),
        Span("idle", 160, 200),
        Span("host", 200, 250),
    ]


def test_a_mixed_phase_is_split_and_nothing_is_lost(ticks: list[int]) -> None:
    ticks += [0, 0, 10, 10, 15]
    clock = Timeline("host", keeps_spans=True)
    with clock.mixed_phase({"prefill": 1, "verify": 2}):
        pass
    assert clock.take() == {"prefill": 3, "verify": 7, "host": 0}
    assert clock.take() == {"host": 5}
    # Taking the times cuts no span in two.
    assert clock.spans == [Span("prefill", 0, 3), Span("verify", 3, 10), Span("host", 10, 15)]


def test_an_error_ends_its_phase(ticks: list[int]) -> None:
    ticks += [0, 1, 3, 6]
    clock = Timeline("idle")
    with pytest.raises(KeyError), clock.phase("draft"):
        raise KeyError
    assert clock.take() == {"idle": 1 + 3, "draft": 2}
    assert clock.spans == []
