"""Which shards a replica tries to claim, so that neither a claim nor a wait costs more among more replicas.

Few replicas take the shards in order. Many would all try the same one: each draws one near those that are
being generated. A replica that waits watches a few of the others' claims, drawn anew from time to time, so
that all waiting replicas together watch all of them.
"""

from __future__ import annotations

import functools
import heapq
import random
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

# So many take the shards in order.
FEW_REPLICAS = 8
# The shards to draw from, for each replica: half of those that are not claimed may be complete.
SHARDS_PER_REPLICA = 2
# A replica that waits watches at least so many claims; and so many replicas watch a claim, on average.
MIN_WATCHED, WATCHERS_PER_CLAIM = 2, 2
# Part of the claimed shards that are taken to be stragglers: others near them have long been complete.
STRAGGLERS = 0.25
# Most splits of a shard that are offered at a time.
MAX_FREE_SPLITS = 8


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

    def without(self, others: Iterable[int]) -> list[int]:
        """Those that are not among the others."""
        is_open = self._is_open.copy()
        for shard in others:
            is_open[shard] = 0
        return list(compress(range(len(is_open)), is_open))

    def discard(self, shard: int) -> None:
        """This one is complete."""
        if shard in self:
            self._is_open[shard] = 0
            self._num_open -= 1


def first_choices(unclaimed: Sequence[int], claimed: Sequence[int], num_replicas: int) -> Iterator[int]:
    """Open shards that are not claimed, in the order in which one of many replicas tries them, which is by
    chance. Both are ascending."""
    start = bisect_left(unclaimed, claimed[int(STRAGGLERS * len(claimed))]) if claimed else 0
    window = list(unclaimed[start : start + SHARDS_PER_REPLICA * num_replicas] or unclaimed)
    # Few of many are tried.
    for index in range(len(window)):
        other = random.randrange(index, len(window))
        window[index], window[other] = window[other], window[index]
        yield window[index]


def watched(claimed: Sequence[str], num_waiting: int, *, replica: str, period: int) -> list[str]:
    """The names claimed by other replicas that this one watches while it waits, ascending.

    Args:
        num_waiting: replicas that wait, with this one.
        period: number of the period of watching: the choice is the same within one.
    """
    num_watched = max(MIN_WATCHED, WATCHERS_PER_CLAIM * len(claimed) // max(1, num_waiting))
    # Multiplied by an odd number, 32 bits are permuted: an order of its own for each replica and period.
    factor = zlib.crc32(f"{replica} {period}".encode()) | 1
    places = [crc * factor & 0xFFFFFFFF for crc in map(_crc32, claimed)]
    return sorted(name for _, name in heapq.nsmallest(num_watched, zip(places, claimed, strict=True)))


def watch_period(now: float, period_s: float, *, replica: str) -> int:
    """Number of the period of watching, which begins at another moment in each replica: else nobody would
    have watched any claim for long after it."""
    return int(now / period_s + _crc32(replica) / 2**32)


@functools.lru_cache(maxsize=2**16)
def _crc32(name: str) -> int:
    return zlib.crc32(name.encode())


def splits_wanted(num_waiting: int, num_claimed: int) -> int:
    """The splits of a shard that should be free for others to take.

    Args:
        num_waiting: replicas that wait.
        num_claimed: shards that are claimed: all that are offer splits.
    """
    return min(-(-num_waiting // max(1, num_claimed)), MAX_FREE_SPLITS)


def split_off(pending: Sequence[int], wanted: int) -> tuple[int, ...]:
    """Of rows that have not begun, those of the next split: half of a fair share, so that splits get smaller
    as rows run out (guided self-scheduling; Polychronopoulos and Kuck 1987), evenly over the order of the
    rows.

    Args:
        wanted: replicas to share with.
    """
    size = -(-len(pending) // (2 * (wanted + 1)))
    return tuple(sorted(pending[index * len(pending) // size] for index in range(size)))
