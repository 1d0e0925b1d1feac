"""How a statistic is declared, once: a field with its meaning and how it merges; and the parts of a shard's
statistics that are times, memory and spans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import Any


def stat(meaning: str, of: Callable[[], Any] = int, *, merge: Callable[[int, int], int] = add) -> Any:
    """A field of integers: one, a list of them, or a dataclass of such fields. Sums unless an
    integer is to ``merge`` in another way. ``meaning``: of the field in the file of a shard."""
    return dataclasses.field(default_factory=of, metadata={"meaning": meaning, "merge": merge})


def add_to(into: Any, other: Any) -> None:
    """Merge another's statistics, or a part of them, into the fields of the same names."""
    for item in dataclasses.fields(other):
        mine, theirs = getattr(into, item.name), getattr(other, item.name)
        if isinstance(mine, int):
            merge = into.__dataclass_fields__[item.name].metadata["merge"]
            setattr(into, item.name, merge(mine, theirs))
        elif isinstance(mine, list):
            mine.extend([0] * (len(theirs) - len(mine)))
            mine[: len(theirs)] = map(add, mine, theirs)
        else:
            add_to(mine, theirs)


def earliest(one_ns: int, other_ns: int) -> int:
    """0 is unknown."""
    return min(one_ns or other_ns, other_ns or one_ns)


@dataclass
class TargetTimes:
    """Nanoseconds of the target's side."""

    prefill: int = stat("target side: passes, the share of prompt tokens")
    verify: int = stat("target side: passes, the share of verified blocks")
    transfer: int = stat("target side: messages")
    idle: int = stat("target side: waiting for the draft")
    host: int = stat("target side: scheduling and other work on the host")

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass
class DraftTimes:
    """Nanoseconds of the draft's side."""

    prefill: int = stat("draft side: passes over prompts")
    draft: int = stat("draft side: drafting")
    transfer: int = stat("draft side: messages")
    idle: int = stat("draft side: waiting for the target")

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass
class PeakMemory:
    """Peak memory of one rank of each role, in bytes."""

    target: int = stat("peak bytes on one rank of the target; merges as a maximum", merge=max)
    draft: int = stat("peak bytes on the draft's rank; merges as a maximum", merge=max)


@dataclass
class WorkSpan:
    """Begin and end of the work on a shard, in nanoseconds of Unix time by the replica's clock; both 0 if
    unknown."""

    begin_unix_ns: int = stat("start of work, by the replica's clock; merges as a minimum", merge=earliest)
    end_unix_ns: int = stat("end of work, across restarts; merges as a maximum", merge=max)

    def extend(self, begin_unix_ns: int, end_unix_ns: int) -> None:
        """Include another span."""
        add_to(self, WorkSpan(begin_unix_ns, end_unix_ns))
