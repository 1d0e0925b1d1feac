"""How long drafting takes in real rounds beside the target's passes, and beside what the costs say. No clock:
the engine's own timelines measure every round."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from specdist.policies.costs import CostModel

# Latest passes that are compared, and fewest that tell something.
MOST_COMPARED, LEAST_COMPARED = 256, 16
# The factor by which drafting may be off. Where the target's passes are off, too, by the same factor, that
# decides nothing else.
MOST_OFF = 2.0


class PassRatios:
    """Measured times over the expected ones, of the latest passes of both models."""

    def __init__(self, costs: CostModel) -> None:
        self.restart(costs)

    def restart(self, costs: CostModel) -> None:
        """These costs decide from now on."""
        self.costs, self.num_target_passes = costs, 0
        self._target, self._draft = deque[float](maxlen=MOST_COMPARED), deque[float](maxlen=MOST_COMPARED)

    def observe_target(self, num_tokens: int, ns: int) -> None:
        """A pass of so many tokens; one that is larger than any measured one does not count."""
        if num_tokens <= self.costs.target.sizes[-1]:
            self.num_target_passes += 1
            self._target.append(ns / max(1.0, self.costs.target.look_up(num_tokens)))

    def observe_draft(self, sizes: Sequence[int], ns: int, *, is_asynchronous: bool) -> None:
        """A round's steps of so many tokens: two of a sequence after an accepted block. With more of them, of
        sequences that were not drafted for, they do not count."""
        costs = self.costs
        if sizes and ns and max(sizes) <= 2 * costs.draft.sizes[-1]:
            beyond = costs.asynchronous if is_asynchronous else costs.synchronous
            expected_ns = sum(map(costs.draft.look_up, sizes)) + beyond.look_up(min(sizes))
            self._draft.append(ns / max(1.0, expected_ns))

    @property
    def has_drafted(self) -> bool:
        return bool(self._draft)

    def factors(self) -> tuple[float, float] | None:
        """What the costs of the target and of drafting have to be multiplied with; None where that decides
        nothing else, or too little is known. Medians, which a disturbed second does not move."""
        if min(len(self._target), len(self._draft)) < LEAST_COMPARED:
            return None
        of_target, of_draft = statistics.median(self._target), statistics.median(self._draft)
        return None if 1 / MOST_OFF <= of_draft / of_target <= MOST_OFF else (of_target, of_draft)
