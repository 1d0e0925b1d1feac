"""Counts what a device was asked to do, by line of the project."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = f"{Path(__file__).parent.parent.parent / 'specdist'}/"


def project_line() -> str:
    """The innermost line of the project that is running, as ``models/passes/graphs.py:57``; "?" if none
    is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


@dataclass(frozen=True)
class Counts:
    """Work since the books were opened.

    Attributes:
        kernels: launches by line, without those of replays.
        copies: copies between host and device, by (kind, line). A kind is "H2D" or "D2H", "pinned" or
            "pageable" memory of the host, and "blocking" or "asynchronous", as in "H2D, pageable, blocking".
        synchronisations: waits of the host for the device by (reason, line); every blocking copy is one.
        num_replays: of graphs.
        captured_kernels: number of kernels of every graph that was captured.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)
    synchronisations: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_replays: int = 0
    captured_kernels: tuple[int, ...] = ()

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()

    @property
    def num_synchronisations(self) -> int:
        return self.synchronisations.total()

    def num_copies(self, *words: str) -> int:
        """Number of copies whose kind has all of these words, such as ``"H2D", "asynchronous"``."""
        return sum(count for (kind, _), count in self.copies.items() if set(words) <= set(kind.split(", ")))


class Books:
    """The counters of a device."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._num_replays = 0
        self._captured_kernels: list[int] = []

    def reset(self) -> None:
        """Start again from zero."""
        self._counts = Counts()
        self._num_replays = 0
        self._captured_kernels = []

    def counts(self) -> Counts:
        """A copy of the counts so far."""
        kept = self._counts
        return Counts(
            Counter(kept.kernels),
            Counter(kept.copies),
            Counter(kept.synchronisations),
            self._num_replays,
            tuple(self._captured_kernels),
        )

    def book_kernel(self) -> None:
        self._counts.kernels[project_line()] += 1

    def book_copy(self, kind: str) -> None:
        self._counts.copies[kind, project_line()] += 1

    def book_synchronisation(self, reason: str) -> None:
        self._counts.synchronisations[reason, project_line()] += 1

    def book_replay(self) -> None:
        self._num_replays += 1

    def book_capture(self, num_kernels: int) -> None:
        self._captured_kernels.append(num_kernels)
