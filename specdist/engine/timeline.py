"""Where a rank's time goes: a stopwatch that is always running, for one kind of work at a time.

So the times of a rank add up to the time that has passed, to the nanosecond. ``time.perf_counter_ns`` is one
clock for all processes of a machine, so the spans of its ranks can be laid side by side.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from specdist.stats import split_proportionally

Kind = Literal["prefill", "draft", "verify", "transfer", "idle", "host"]


class Span(NamedTuple):
    """Work of one kind, from ``begin_ns`` to ``end_ns`` on the machine's clock."""

    kind: Kind
    begin_ns: int
    end_ns: int


class Timeline:
    """Books every nanosecond since it was made, or since the last :meth:`take`, to one kind of work."""

    def __init__(self, rest: Kind, *, keeps_spans: bool = False) -> None:
        """``rest`` is the kind of what happens outside of all phases.

        ``keeps_spans``: remember also when, in ``spans``, without end.
        """
        self.spans: list[Span] = []
        self._keeps_spans = keeps_spans
        self._times: Counter[Kind] = Counter()
        self._weights: Mapping[Kind, int] = {rest: 1}
        self._since = time.perf_counter_ns()

    @contextlib.contextmanager
    def phase(self, kind: Kind) -> Iterator[None]:
        """What runs inside is of this kind; the phase around it pauses."""
        with self.mixed_phase({kind: 1}):
            yield

    @contextlib.contextmanager
    def mixed_phase(self, weights: Mapping[Kind, int]) -> Iterator[None]:
        """What runs inside is of several kinds at once: its time is split in proportion to the weights."""
        outer = self._weights
        self._turn_to(weights)
        try:
            yield
        finally:
            self._turn_to(outer)

    def take(self) -> dict[Kind, int]:
        """Nanoseconds per kind since the last call; they add up to the time since then."""
        self._turn_to(self._weights)
        times, self._times = self._times, Counter()
        return dict(times)

    def _turn_to(self, weights: Mapping[Kind, int]) -> None:
        """Book what has passed, and go on with other kinds."""
        now, begin = time.perf_counter_ns(), self._since
        for kind, amount in split_proportionally(now - begin, self._weights).items():
            self._times[kind] += amount
            if self._keeps_spans and amount:
                self._keep(Span(kind, begin, begin + amount))
            begin += amount
        self._since, self._weights = now, weights

    def _keep(self, span: Span) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.kind, last.end_ns) == (span.kind, span.begin_ns):
            self.spans[-1] = last._replace(end_ns=span.end_ns)
        else:
            self.spans.append(span)
