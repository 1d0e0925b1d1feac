"""When there is time for work beside the rounds: while the draft waits, and before the next message is due.

A message is due as soon after the last reply as it has been in nearly all of the last rounds. Work that does
not end before then would let it wait. Where waits are much longer than those before, as where the target goes
on without the draft, work may go on in pieces that are a small part of the time waited so far. What messages
have waited all the same is counted: beyond a share of the time there is no more work until that is less, and
below it there is, so that a piece that fits into no wait is done once in a while.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Waits that are remembered, and the place of the one in their order that tells when a message is due.
NUM_WAITS, DUE_PLACE = 48, 6
# Of the time waited so far, of a piece of work that may let a message wait.
LATE_PIECE = 0.01
# Of all time, for which messages may have waited; what is counted loses half of its weight in so many
# seconds.
LATE_SHARE, HALF_LIFE_S = 0.005, 10.0


class SpareTime:
    """Pure arithmetic on a clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: in seconds."""
        self._clock = clock
        self._waits: deque[float] = deque(maxlen=NUM_WAITS)
        self._due_s = 0.0
        self._began = self._last = clock()
        # Seconds that messages have waited, and seconds, both fading.
        self._late_s = self._all_s = 0.0
        self.late_s = 0.0

    @property
    def due_s(self) -> float:
        """From the beginning of a wait until a message is due; 0 while too little is known."""
        return self._due_s

    def begin(self) -> None:
        """A wait begins."""
        self._began = self._clock()

    def may_take(self, seconds: float) -> bool:
        """Whether work of this length may begin now."""
        waited = self._clock() - self._began
        if self._late_s > LATE_SHARE * self._all_s:
            return False
        is_covered = self._late_s + seconds <= LATE_SHARE * self._all_s
        return is_covered or waited + seconds <= self._due_s or seconds <= LATE_PIECE * waited

    def next_chance_s(self, seconds: float) -> float:
        """From now on, until a piece of this length may begin because so much has been waited for."""
        return max(0.0, seconds / LATE_PIECE - (self._clock() - self._began))

    def end(self, came: float, *, is_late: bool) -> None:
        """A message has come. ``came``: when, or the latest moment at which it was not there; ``is_late``: it
        was found after a piece of work."""
        now = self._clock()
        late_s = now - came if is_late else 0.0
        fading = 0.5 ** ((now - self._last) / HALF_LIFE_S)
        self._late_s, self._all_s = fading * self._late_s + late_s, fading * self._all_s + now - self._last
        self._last = now
        self.late_s += late_s
        self._waits.append(came - self._began)
        if len(self._waits) > DUE_PLACE:
            self._due_s = sorted(self._waits)[DUE_PLACE * len(self._waits) // NUM_WAITS]
