"""Which shards a replica tries to lease, so that neither a lease nor a wait costs more among more replicas.

Few replicas take the shards in order. Many would all try the same one: each draws one near those that are
being generated. A replica that waits watches a few of the others' leases, drawn anew from time to time, so
that all waiting replicas together watch all of them.
"""

from __future__ import annotations

import functools
import random
import zlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress

import numpy as np

# So many take the shards in order.
FEW_REPLICAS = 8
# The shards to draw from, for each replica: half of those that are not leased may be complete.
SHARDS_PER_REPLICA = 2
# A replica that waits watches at least so many leases; and so many replicas watch a lease, on average.
MIN_WATCHED, WATCHERS_PER_LEASE = 2, 2
# Part of the leased shards that are taken to be stragglers: others near them have long been complete.
STRAGGLERS = 0.25
# Most sub-shards of a shard that are offered at a time.
MAX_FREE_SUB_SHARDS = 8


class OpenShards:
    """The shards that are not known to be complete, ascending: a byte for each, since there may be a million
    in every replica."""

    def __init__(self, num_shards: int) -> None:
        self._is_open = bytearray(b"\1") * num_shards
        self._num_open = num_shards

    def __len__(self) -> int:
        return self._num_open

    def __iter__(self) -> Iterator[int]:
        return compress(range(len(self._is_open)), self._is_open)

    def __contains__(self, shard: int) -> bool:
        return 0 <= shard < len(self._is_open) and bool(self._is_open[shard])

    def without(self, mine: Collection[int], leased: np.ndarray | None = None) -> list[int]:
        """Those that are not among these."""
        is_open = np.frombuffer(self._is_open, np.bool_).copy()
        is_open[np.fromiter(mine, np.int64, len(mine))] = False
        if leased is not None:
            is_open[leased] = False
        found: list[int] = np.flatnonzero(is_open).tolist()
        return found

    def discard(self, shard: int) -> None:
        """This one is complete."""
        if shard in self:
            self._is_open[shard] = 0
            self._num_open -= 1


def first_choices(
    unleased: Sequence[int], leased: Sequence[int] | np.ndarray, num_replicas: int
) -> Iterator[int]:
    """Open shards that are not leased, in the order in which one of many replicas tries them, which is by
    chance. Both are ascending."""
    start = bisect_left(unleased, leased[int(STRAGGLERS * len(leased))]) if len(leased) else 0
    window = list(unleased[start : start + SHARDS_PER_REPLICA * num_replicas] or unleased)
    # Few of many are tried.
    for index in range(len(window)):
        other = random.randrange(index, len(window))
        window[index], window[other] = window[other], window[index]
        yield window[index]


def name_hashes(names: Iterable[str]) -> np.ndarray:
    """For :func:`watched`."""
    return np.fromiter(map(_crc32, names), np.uint32)


def watched(
    leased: Sequence[str],
    hashes: np.ndarray,
    num_waiting: int,
    *,
    replica: str,
    period: int,
    mine: Collection[str] = (),
) -> list[str]:
    """The names leased by other replicas that this one watches while it waits, ascending.

    Args:
        hashes: of the names.
        num_waiting: replicas that wait, with this one.
        period: number of the period of watching: the choice is the same within one.
        mine: names that this replica has leased itself.
    """
    if not leased:
        return []
    num_watched = max(MIN_WATCHED, WATCHERS_PER_LEASE * len(leased) // max(1, num_waiting))
    # Multiplied by an odd number, 32 bits are permuted: an order of its own for each replica and period.
    factor = zlib.crc32(f"{replica} {period}".encode()) | 1
    places = hashes * np.uint32(factor)
    num_first = min(num_watched + len(mine), len(leased))
    first = np.argpartition(places, num_first - 1)[:num_first]
    return sorted(leased[index] for index in first if leased[index] not in mine)


def watch_period(now: float, period_s: float, *, replica: str) -> int:
    """Number of the period of watching, which begins at another moment in each replica: else nobody would
    have watched any lease for long after it."""
    return int(now / period_s + _crc32(replica) / 2**32)


@functools.lru_cache(maxsize=2**16)
def _crc32(name: str) -> int:
    return zlib.crc32(name.encode())


def sub_shards_wanted(num_waiting: int, num_leased: int) -> int:
    """The sub-shards of a shard that should be free for others to take.

    Args:
        num_waiting: replicas that wait.
        num_leased: shards that are leased: all that are offer sub-shards.
    """
    return min(-(-num_waiting // max(1, num_leased)), MAX_FREE_SUB_SHARDS)


def split_off(pending: Sequence[int], wanted: int) -> tuple[int, ...]:
    """Of rows that have not begun, those of the next sub-shard: half of a fair share, so that sub-shards get
    smaller as rows run out (guided self-scheduling; Polychronopoulos and Kuck 1987), evenly over the order of
    the rows.

    Args:
        wanted: replicas to share with.
    """
    size = -(-len(pending) // (2 * (wanted + 1)))
    return tuple(sorted(pending[index * len(pending) // size] for index in range(size)))
