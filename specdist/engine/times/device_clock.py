"""Times of a device: events in its queue of work, and the synchronisation that benchmarks need."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from specdist.data.stats.regression import NS_PER_S
from specdist.engine.times.timeline import Clock, HostClock

NS_PER_MS = 1_000_000

Result = TypeVar("Result")


class TimingEvent(Protocol):
    """The part of ``torch.cuda.Event(enable_timing=True)`` that is used here; none of it waits."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class DeviceClock:
    """A mark is an event in the current stream: the moment when the device has done all work before it.

    Between two marks lies the work that was queued between them, and the time in which the device was idle.
    Marks have to be read in the order in which they were made.
    """

    def __init__(self, new_event: Callable[[], TimingEvent]) -> None:
        self._new_event = new_event

    def mark(self) -> TimingEvent:
        event = self._new_event()
        event.record()
        return event

    def elapsed_ns(self, begin: TimingEvent, end: TimingEvent) -> int | None:
        """The device counts in steps of about half a microsecond."""
        # Both are checked, since torch raises an error if one is not done; the stream may have changed.
        if not (begin.query() and end.query()):
            return None
        # From mark to mark: a float of milliseconds could not hold the time since the start of the run
        # exactly.
        return max(0, round(begin.elapsed_time(end) * NS_PER_MS))


def clock_of(device: torch.device) -> Clock:
    """The clock for work on a device."""
    if device.type == "cuda":
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
    return HostClock()


def synchronized_ns(device: torch.device) -> int:
    """``time.perf_counter_ns`` after the device has done all queued work. For measurements only: a round
    never synchronises."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()


def timed(device: torch.device, action: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds that ``action`` took, including the work that it queued on the device; and its result."""
    begin_ns = synchronized_ns(device)
    result = action()
    return (synchronized_ns(device) - begin_ns) / NS_PER_S, result
