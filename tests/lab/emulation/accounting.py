"""How much of emulated rounds the host added to what the devices needed.

A *round* lasts from the beginning of one target pass to that of the next. Without any host it would last as
long as its passes: if it is synchronous, as long as any of the two devices works; with a draft that may
work ahead, as long as what the draft does before its reply, and then the busier of the two. The rest is
*exposed* host time: Python, messages and files for which a device that the round needs stood still.

R rounds, P passes of a device, S replies of the draft, M moments. All times are nanoseconds of
``time.monotonic_ns``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SideLog:
    """What one side's device and host did.

    Attributes:
        passes_P2: begin and end of the device's passes.
        spans_S2: of the draft's side, from a request to its reply.
        num_slow: passes for which the work that stands in for the device's took longer than the pass.
    """

    passes_P2: np.ndarray
    spans_S2: np.ndarray
    num_slow: int


@dataclass(frozen=True)
class RoundTimes:
    """Of R steady rounds: their length and what of it no device accounts for, in nanoseconds."""

    lengths_R: np.ndarray
    exposed_R: np.ndarray

    @property
    def seconds(self) -> float:
        return float(self.lengths_R.sum()) / 1e9

    @property
    def exposed_share(self) -> float:
        return float(self.exposed_R.sum() / self.lengths_R.sum())


def round_times(
    edges_R1: np.ndarray, target: SideLog, draft: SideLog | None, *, is_asynchronous: bool
) -> RoundTimes:
    """The times of the rounds between these moments, which are the beginnings of target passes.

    Args:
        draft: of a rank of its own; None for a draft on the target's device, or none.
    """
    lengths_R = np.diff(edges_R1)
    busy_R = np.diff(busy_until(target.passes_P2, edges_R1))
    if draft is None:
        return RoundTimes(lengths_R, lengths_R - busy_R)
    own_P2 = draft.passes_P2
    if not is_asynchronous:
        either_P2 = np.concatenate([target.passes_P2, own_P2])
        return RoundTimes(lengths_R, lengths_R - np.diff(busy_until(either_P2, edges_R1)))
    # Work ahead, and work before a reply, which may be some even where the draft works ahead.
    is_now_P = _lies_in(own_P2[:, 0], draft.spans_S2)
    ahead_R, now_R = (np.diff(busy_until(own_P2[index], edges_R1)) for index in (~is_now_P, is_now_P))
    return RoundTimes(lengths_R, lengths_R - now_R - np.maximum(busy_R, ahead_R))


def _lies_in(moments_M: np.ndarray, spans_S2: np.ndarray) -> np.ndarray:
    """bool [M]: whether each moment lies in one of the spans, which are in order."""
    if not len(spans_S2):
        return np.zeros(len(moments_M), bool)
    index_M = np.searchsorted(spans_S2[:, 0], moments_M, side="right") - 1
    return (index_M >= 0) & (moments_M < spans_S2[index_M, 1])


def busy_until(intervals_P2: np.ndarray, moments_M: np.ndarray) -> np.ndarray:
    """int64 [M]: nanoseconds before each moment that lie in at least one of the intervals."""
    if not len(intervals_P2):
        return np.zeros(len(moments_M), np.int64)
    ordered_P2 = intervals_P2[np.argsort(intervals_P2[:, 0], kind="stable")]
    # What earlier intervals have covered already is cut off.
    covered_P = np.maximum.accumulate(np.r_[ordered_P2[0, 0], ordered_P2[:-1, 1]])
    begins_P = np.maximum(ordered_P2[:, 0], covered_P)
    ends_P = np.maximum(ordered_P2[:, 1], begins_P)
    sums_P = np.r_[0, np.cumsum(ends_P - begins_P)]
    index_M = np.searchsorted(begins_P, moments_M, side="right")
    last_M = np.maximum(index_M - 1, 0)
    unfinished_M = np.where(index_M > 0, np.maximum(ends_P[last_M] - moments_M, 0), 0)
    return np.asarray(sums_P[index_M] - unfinished_M)
