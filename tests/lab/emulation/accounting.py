"""Where the time of emulated rounds went: what the devices needed, and what the host added.

A *round* lasts from the beginning of one target pass to that of the next. Without any host it would last as
long as its passes: if it is synchronous, as long as any of the two devices works; with a draft that may
work ahead, as long as what the draft does before its reply, and then the busier of the two. The rest is
*exposed* host time: Python, messages and files for which a device that the round needs stood still. Host time
in which such a device worked is *hidden*.

R rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.lab.emulation.sides import SideLog

NS_PER_MS = 1e6


@dataclass(frozen=True)
class HostTime:
    """Milliseconds per round of one side's host: exposed, and hidden by the devices' work."""

    exposed_ms: float
    hidden_ms: float


@dataclass(frozen=True)
class RoundTimes:
    """Of R steady rounds: their length and what of it no device accounts for, in nanoseconds; and the host
    time of each side."""

    lengths_R: np.ndarray
    exposed_R: np.ndarray
    target: HostTime
    draft: HostTime | None

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

    A moment at which no device works is the draft's while it answers a request, else the target's. What is
    exposed beyond that, because the busier device stood still while the other one worked, is that device's.

    Args:
        draft: of a rank of its own; None for a draft on the target's device, or none.
    """
    lengths_R = np.diff(edges_R1)
    busy_R = np.diff(busy_until(target.passes_P2, edges_R1))
    # Of the draft's device: work ahead, and work before a reply, which may be some even where it works ahead.
    ahead_R, now_R = np.zeros((2, len(lengths_R)), np.int64)
    passes_P2 = target.passes_P2
    if draft is not None:
        own_P2 = draft.passes_P2
        is_now_P = _lies_in(own_P2[:, 0], draft.spans_S2)
        ahead_R, now_R = (np.diff(busy_until(own_P2[index], edges_R1)) for index in (~is_now_P, is_now_P))
        passes_P2 = np.concatenate([passes_P2, own_P2])
    none_busy_R = lengths_R - np.diff(busy_until(passes_P2, edges_R1))
    exposed_R = none_busy_R
    if is_asynchronous:
        exposed_R = lengths_R - now_R - np.maximum(busy_R, ahead_R)
    waits_for_draft_R = ahead_R > busy_R
    others_R = exposed_R - none_busy_R
    exposed_by_draft = float(others_R[waits_for_draft_R].sum())
    if draft is not None:
        spans_S2 = np.clip(draft.spans_S2, edges_R1[0], edges_R1[-1])
        busy_S = np.diff(busy_until(passes_P2, spans_S2.ravel()).reshape(-1, 2), axis=1)[:, 0]
        exposed_by_draft += float((np.diff(spans_S2, axis=1)[:, 0] - busy_S).sum())
    num_rounds = len(lengths_R)
    exposed_by_target = float(exposed_R.sum()) - exposed_by_draft
    return RoundTimes(
        lengths_R,
        exposed_R,
        _host_time(target, edges_R1, exposed_by_target, num_rounds),
        None if draft is None else _host_time(draft, edges_R1, exposed_by_draft, num_rounds),
    )


@dataclass(frozen=True)
class HostPath:
    """Milliseconds per round for which no device works, by what the host does meanwhile. Means of the rounds
    in which the draft is asked; they last from the end of one target pass to the beginning of the next.

    Attributes:
        request_ms: the target's side commits, plans and asks, until the draft begins to answer.
        drafting_ms: until the draft's first pass begins; 0 for a draft that has worked ahead.
        reply_ms: from its last draw, or from the request, to its reply.
        next_pass_ms: the reply travels, and the target's pass begins.
    """

    request_ms: float
    drafting_ms: float
    reply_ms: float
    next_pass_ms: float


def host_path(edges_R1: np.ndarray, target: SideLog, draft: SideLog | None) -> HostPath | None:
    """Between these beginnings of target passes; None without a draft that is asked."""
    if draft is None or not len(draft.spans_S2):
        return None
    begins_R, next_R = edges_R1[:-1], edges_R1[1:]
    ends_R = target.passes_P2[np.searchsorted(target.passes_P2[:, 0], begins_R), 1]
    answers_R2 = draft.spans_S2[np.maximum(np.searchsorted(draft.spans_S2[:, 1], next_R) - 1, 0)]
    asked = np.flatnonzero((answers_R2[:, 0] > begins_R) & (answers_R2[:, 1] <= next_R))
    if not len(asked):
        return None
    asked_R, replied_R = answers_R2[asked].T
    # A pass that was queued before the request belongs to the work ahead.
    own_P2 = draft.passes_P2
    first_R, last_R = np.searchsorted(own_P2[:, 0], asked_R), np.searchsorted(own_P2[:, 0], replied_R)
    has_drafted_R = last_R > first_R
    drafting_R = np.where(has_drafted_R, own_P2[np.minimum(first_R, len(own_P2) - 1), 0], asked_R)
    moments_R5 = np.stack([ends_R[asked], asked_R, drafting_R, replied_R, next_R[asked]], axis=1)
    passes_P2 = np.concatenate([target.passes_P2, own_P2])
    busy_R5 = busy_until(passes_P2, moments_R5.ravel()).reshape(moments_R5.shape)
    idle_4 = (np.diff(moments_R5, axis=1) - np.diff(busy_R5, axis=1)).mean(axis=0) / NS_PER_MS
    return HostPath(*idle_4.tolist())


def _host_time(side: SideLog, edges_R1: np.ndarray, exposed: float, num_rounds: int) -> HostTime:
    moments_M, used_M = side.marks_M2.T
    begin, end = np.interp(edges_R1[[0, -1]], moments_M, used_M)
    hidden = max(0.0, float(end - begin) - exposed)
    return HostTime(exposed / num_rounds / 1e6, hidden / num_rounds / 1e6)


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
