"""How many steps of a drafting the device is given at once."""

from __future__ import annotations

import numpy as np

from specdist.models.passes.static_runs import LONGEST_RUN

# What a drafting still counts after each further one.
MEMORY = 0.9


class RunLengths:
    """How many steps to run before the policy is asked: as many as half of the draftings that came so far,
    and went on to here, needed, by their running average.

    A run is then the last one with a probability of about a half or more: a drafting takes two runs or less
    on average, whatever the policy, and the longest few more. A step that nobody needed costs as much as any
    other, and a wait less, so runs are no longer than that. Nothing depends on a clock.
    """

    def __init__(self, max_steps: int) -> None:
        # By number of steps: draftings that needed so many. Before the first one, short ones are expected.
        self._weights_D = 0.5 ** np.arange(max_steps + 1)
        self._weights_D[0] = 0.0

    def next(self, num_steps: int) -> int:
        """Of a drafting that has had ``num_steps`` and goes on."""
        longer_D = self._weights_D[::-1].cumsum()[::-1][num_steps + 1 :]
        return min(max(1, int((longer_D >= longer_D[:1] / 2).sum())), LONGEST_RUN)

    @property
    def expects_any(self) -> bool:
        """Whether at least half of the draftings have had a step."""
        return bool(self._weights_D[0] <= self._weights_D.sum() / 2)

    def observe(self, num_steps: int) -> None:
        """A drafting has needed so many."""
        self._weights_D *= MEMORY
        self._weights_D[min(num_steps, len(self._weights_D) - 1)] += 1 - MEMORY
