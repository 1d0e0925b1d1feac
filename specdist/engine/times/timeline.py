"""Where a rank's time goes: a stopwatch that always runs, for one kind of work at a time.

So the times of a rank add up to the elapsed time, to the nanosecond. A :class:`Clock` says when a phase
ended. On a host that is when the call returns. A device works asynchronously: there a phase ends when the
device has done all that was queued in it (:class:`DeviceClock`). Its bounds are events in the device's queue,
which are read once they have been reached and never waited for; time up to events that have not been reached
at the end of a round is counted in a later round.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from specdist.data.stats.shard import split_proportionally

Kind = Literal["prefill", "draft", "verify", "transfer", "idle", "host"]
NS_PER_MS = 1_000_000


class Clock(Protocol):
    """Marks moments, and measures the time between two of them once both have been reached."""

    def mark(self) -> Any:
        """The moment at which all work queued so far is done."""
        ...

    def elapsed_ns(self, begin: Any, end: Any) -> int | None:
        """Nanoseconds from a mark that has been reached to a later one; None if the later one has not
        been."""
        ...


class HostClock:
    """Work on a host is done when the call returns, so a mark is the present time."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def elapsed_ns(self, begin: int, end: int) -> int:
        return end - begin


@dataclass
class PhaseTime:
    """The duration of a phase, without the phases inside it; ``is_known`` once its end has been reached."""

    ns: int = 0
    is_known: bool = False


class _Interval(NamedTuple):
    """Time without a change of phase, up to the mark ``end``, which may not have been reached yet."""

    weights: Mapping[Kind, int]
    phase: PhaseTime
    end: Any
    ends_phase: bool


class _OpenPhase:
    """A phase while it lasts. A round has many, so they are not generators."""

    def __init__(
        self,
        switch_to: Callable[..., None],
        weights: Mapping[Kind, int],
        outer: tuple[Mapping[Kind, int], PhaseTime],
    ) -> None:
        self._switch_to, self._outer = switch_to, outer
        self.weights = weights

    def __enter__(self) -> PhaseTime:
        inner = PhaseTime()
        self._switch_to(self.weights, inner)
        return inner

    def __exit__(self, *error: object) -> None:
        self._switch_to(*self._outer, ends_phase=True)


class Timeline:
    """Counts every nanosecond since its creation, or since :meth:`restart`, for one kind of work."""

    def __init__(self, rest: Kind, *, clock: Clock | None = None) -> None:
        """``rest`` is the kind of the time outside all phases; the ``clock`` is by default the host's."""
        self._clock = clock or HostClock()
        self._times: defaultdict[Kind, int] = defaultdict(int)
        self._weights: Mapping[Kind, int] = {rest: 1}
        self._phase = PhaseTime()
        # Intervals whose end had not been reached when last checked, the earliest first.
        self._pending: deque[_Interval] = deque()
        self._begin()

    def phase(self, kind: Kind) -> contextlib.AbstractContextManager[PhaseTime]:
        """Work inside is of this kind; the phase around it pauses."""
        return self.mixed_phase({kind: 1})

    def mixed_phase(self, weights: Mapping[Kind, int]) -> contextlib.AbstractContextManager[PhaseTime]:
        """Work inside is of several kinds at once: its time is split in proportion to the weights."""
        return _OpenPhase(self._switch_to, weights, (self._weights, self._phase))

    def take(self) -> dict[Kind, int]:
        """Nanoseconds per kind that have become known since the last call.

        On a host they add up to the time since then; on a device, to the time between the last marks that had
        been reached at each of the two calls.
        """
        return self.cut()()

    def cut(self) -> Callable[[], dict[Kind, int]]:
        """Like :meth:`take`, of the times up to now; they are read when what is returned is called."""
        self._switch_to(self._weights, self._phase)
        last = self._pending[-1]

        def times() -> dict[Kind, int]:
            self._resolve(last)
            return self.counted()

        return times

    def counted(self) -> dict[Kind, int]:
        """What :meth:`settle` had counted by its last call and was not taken since. The rest stays for the
        next time; nothing is read now."""
        known, self._times = self._times, defaultdict(int)
        return dict(known)

    def settle(self) -> None:
        """Count what is known by now, so that :meth:`take` has less to do."""
        if self._pending:
            self._resolve(self._pending[-1])

    def restart(self) -> None:
        """Forget everything up to now."""
        self._pending.clear()
        self._times.clear()
        self._begin()

    def _begin(self) -> None:
        self._since = self._clock.mark()

    def _switch_to(self, weights: Mapping[Kind, int], phase: PhaseTime, *, ends_phase: bool = False) -> None:
        """Work from now on is of these kinds."""
        self._pending.append(_Interval(self._weights, self._phase, self._clock.mark(), ends_phase))
        self._weights, self._phase = weights, phase

    def _resolve(self, last: _Interval) -> None:
        """Count the intervals up to this one whose ends have been reached."""
        while self._pending:
            interval = self._pending[0]
            elapsed_ns = self._clock.elapsed_ns(self._since, interval.end)
            if elapsed_ns is None:
                return
            self._pending.popleft()
            self._add(interval, elapsed_ns)
            if interval is last:
                return

    def _add(self, interval: _Interval, elapsed_ns: int) -> None:
        if len(interval.weights) == 1:
            self._times[next(iter(interval.weights))] += elapsed_ns
        else:
            for kind, amount in split_proportionally(elapsed_ns, interval.weights).items():
                self._times[kind] += amount
        interval.phase.ns += elapsed_ns
        interval.phase.is_known = interval.ends_phase
        self._since = interval.end


class DeviceClock:
    """A mark is an event in the current stream: the moment when the device has done all work before it.

    Between two marks lies the work that was queued between them, and the time in which the device was idle.
    Marks have to be read in the order in which they were made.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        """``new_event``: makes what ``torch.cuda.Event(enable_timing=True)`` does."""
        self._new_event = new_event

    def mark(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def elapsed_ns(self, begin: Any, end: Any) -> int | None:
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
