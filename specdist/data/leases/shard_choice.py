"""Which shards a replica tries to lease, so that neither a lease nor a wait costs more among more replicas.

Few replicas take the shards in order. Many would all try the same one: each draws one of the next. A replica
that waits watches a few of the others' leases, drawn anew from time to time, so that all waiting replicas
together watch all of them.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

# The largest number of replicas that take the shards in order.
FEW_REPLICAS = 8
# A replica that waits watches at least so many leases; and so many replicas watch a lease, on average.
MIN_WATCHED, WATCHERS_PER_LEASE = 2, 2
# Most sub-shards of a shard that are offered at a time.
MAX_FREE_SUB_SHARDS = 8


def first_choices(unleased: Sequence[int], num_replicas: int) -> list[int]:
    """The shards that one of many replicas tries, in an order by chance: the next ones of those without a
    lease, which are ascending, as many as there are replicas."""
    return random.sample(unleased[:num_replicas], min(len(unleased), num_replicas))


def watched(leased: Sequence[str], num_waiting: int, *, replica: str, period: int) -> list[str]:
    """The names leased by other replicas that this one watches while it waits.

    Args:
        num_waiting: replicas that wait, with this one.
        period: number of the period of watching: the choice is the same within one.
    """
    num_watched = max(MIN_WATCHED, WATCHERS_PER_LEASE * len(leased) // max(1, num_waiting))
    # By its checksum a name keeps its place as other leases come and go.
    return sorted(leased, key=lambda name: zlib.crc32(f"{replica} {period} {name}".encode()))[:num_watched]


def watch_period(now: float, period_s: float, *, replica: str) -> int:
    """Number of the period of watching, which begins at another moment in each replica: else nobody would
    have watched any lease for long after it."""
    return int(now / period_s + zlib.crc32(replica.encode()) / 2**32)


def sub_shards_wanted(num_waiting: int, num_leased: int) -> int:
    """The sub-shards of a shard that should be free for others to take.

    Args:
        num_waiting: replicas that wait.
        num_leased: shards that are leased: all that are offer sub-shards.
    """
    return min(-(-num_waiting // max(1, num_leased)), MAX_FREE_SUB_SHARDS)


def split_off(pending: Sequence[int], wanted: int) -> tuple[int, ...]:
    """Choose the rows of the next sub-shard among those that have not begun: half of a fair share, so that
    sub-shards get smaller as rows run out (guided self-scheduling; Polychronopoulos and Kuck 1987), evenly
    over the order of the rows.

    Args:
        wanted: replicas to share with.
    """
    size = -(-len(pending) // (2 * (wanted + 1)))
    return tuple(sorted(pending[index * len(pending) // size] for index in range(size)))
