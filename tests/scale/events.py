"""What happens when, on a virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """Actions to come, and the time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Of several actions at the same time, the one that was asked for first comes first."""
        self._num_events += 1
        heapq.heappush(self._events, (self.now + seconds, self._num_events, action))

    @property
    def has_next(self) -> bool:
        return bool(self._events)

    def advance(self) -> Callable[[], None]:
        """Go to the time of the next action, which is returned."""
        self.now, _, action = heapq.heappop(self._events)
        return action
