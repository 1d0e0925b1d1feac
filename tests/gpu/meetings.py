"""Decides which ranks may begin a collective together, and which would wait for one another for ever.

A rank that is about to take part in a collective, or in a message to another rank, says what it is about to
do. It may begin once everyone whom that takes has said the same. Ranks that can never meet are told so at
once, with what all of them were doing. That is stricter than NCCL and gloo, whose collectives may pass each
other on different backends as long as no host waits, and which hang or mix up data otherwise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

NCCL, GLOO = "NCCL", "gloo"


@dataclass(frozen=True, kw_only=True)
class Call:
    """The collective or message that one rank is about to begin.

    Attributes:
        members: ranks of the world that it takes, this one included.
        shapes, dtypes: of the tensors that must be alike on all members.
        root: the rank of the world that sends to, or receives from, the others; a message's sender.
        detail: what else the members must agree about, such as the operation of a reduction.
        group: the name by which all members know the group.
        stack: where in the program it is, the outermost line first.
    """

    rank: int
    name: str
    backend: str
    group: str
    members: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    root: int | None = None
    detail: str = ""
    stack: tuple[str, ...] = ()

    @property
    def agreement(self) -> dict[str, object]:
        """What must be the same on all members. A message is sent by one member and received by the other."""
        return {
            "operation": "message" if self.name in ("send", "recv") else self.name,
            "backend": self.backend,
            "group": (self.group, self.members),
            "shape": self.shapes,
            "dtype": self.dtypes,
            "root": self.root,
            "detail": self.detail,
        }

    def __str__(self) -> str:
        parts = [f"{self.name} on {self.backend} in {self.group} {list(self.members)}"]
        parts += [f"{list(shape)} {dtype}" for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        if self.root is not None:
            parts.append(f"root {self.root}")
        return ", ".join([*parts, *([self.detail] if self.detail else [])])

    def with_stack(self) -> str:
        """Several lines."""
        return "\n".join([f"rank {self.rank}: {self}", *(f"    {line}" for line in self.stack)])


Answers = dict[int, str | None]
"""By rank: None to begin, or why its call fails."""


class Meetings:
    """The calls that the ranks of one world wait to begin.

    Attributes:
        counts: by rank, how often it has entered each (operation, backend, group).
        failure: why no rank may go on; None as long as all is well.
        waiting: the calls that have not begun, by rank.
    """

    def __init__(self) -> None:
        self.counts: dict[int, Counter[tuple[str, str, str]]] = {}
        self.failure: str | None = None
        self.waiting: dict[int, Call] = {}
        self._gone: set[int] = set()

    def arrive(self, rank: int) -> None:
        """A rank begins, perhaps in a new process in place of one that has ended."""
        self._gone.discard(rank)

    def enter(self, call: Call) -> Answers:
        """The ranks to answer, now that this rank waits to begin."""
        self.counts.setdefault(call.rank, Counter())[call.name, call.backend, call.group] += 1
        if self.failure is not None:
            return {call.rank: self.failure}
        self.waiting[call.rank] = call
        if all(self._agrees(call, member) for member in call.members):
            for member in call.members:
                del self.waiting[member]
            return dict.fromkeys(call.members)
        if stuck := self._stuck():
            return self.fail(_mismatch(stuck))
        return self._disconnected()

    def leave(self, rank: int) -> Answers:
        """A rank has ended, in good order or not."""
        self._gone.add(rank)
        self.waiting.pop(rank, None)
        return self._disconnected()

    def fail(self, reason: str) -> Answers:
        """No rank may go on."""
        self.failure = reason
        answers: Answers = dict.fromkeys(self.waiting, reason)
        self.waiting.clear()
        return answers

    def missing(self, rank: int) -> list[int]:
        """The ranks that a waiting one waits for."""
        call = self.waiting[rank]
        return [member for member in call.members if not self._agrees(call, member)]

    def _agrees(self, call: Call, member: int) -> bool:
        other = self.waiting.get(member)
        return other is not None and other.agreement == call.agreement

    def _stuck(self) -> list[Call]:
        """The calls that can never begin, whatever the ranks that are not waiting do."""
        able: set[int] = set()
        while more := {
            rank
            for rank, call in self.waiting.items()
            if rank not in able
            and all(m not in self.waiting or m in able or self._agrees(call, m) for m in call.members)
        }:
            able |= more
        return [call for rank, call in sorted(self.waiting.items()) if rank not in able]

    def _disconnected(self) -> Answers:
        """Gloo notices that a connection has closed. NCCL does not: the rank waits on."""
        answers: Answers = {}
        for rank, call in self.waiting.items():
            gone = self._gone & set(call.members)
            if gone and call.backend == GLOO:
                ended = ", ".join(map(str, sorted(gone)))
                answers[rank] = (
                    f"[gloo] Connection closed by peer: rank {ended} has ended\n{call.with_stack()}"
                )
        for rank in answers:
            del self.waiting[rank]
        return answers


def _mismatch(calls: list[Call]) -> str:
    """The calls of ranks that can never meet: in one line, then with their stacks."""
    one, other = next(
        (one, other)
        for one in calls
        for other in calls
        if other.rank in one.members and other.agreement != one.agreement
    )
    differing = [what for what, value in one.agreement.items() if value != other.agreement[what]]
    line = f"rank {one.rank}: {one}; rank {other.rank}: {other}"
    stacks = [call.with_stack() for call in calls]
    return "\n".join([f"collectives do not match ({', '.join(differing)}): {line}", *stacks])
