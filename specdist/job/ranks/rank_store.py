"""States and failures that the ranks of a replica exchange through the launcher's key-value store.

The store may end before the ranks: with the launcher, or with rank 0 where the launcher has no store.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch.distributed as dist

from specdist.data.leases.heartbeat import Process

FAILURE_KEY = "failure"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Failure:
    """Why a replica ends.

    ``usage``: an error of the user; ``memory``: memory ran out, and a smaller batch may help; ``missing``:
    the rank never arrived; ``gone``: its process has ended; ``silent``: its process exists but its watchdog
    does not run; ``stalled``: no rank makes progress, and ``rank`` is the one that noticed.
    """

    kind: Literal["error", "usage", "disk", "memory", "missing", "gone", "silent", "stalled"]
    rank: int
    role: str
    reason: str

    def __str__(self) -> str:
        if self.kind in ("missing", "stalled"):
            return self.reason
        return f"rank {self.rank} ({self.role}): {self.reason}"


@dataclass(frozen=True)
class RankState:
    """A rank's state, for the other ranks. ``idle_s``: seconds since its last step."""

    process: Process
    num_beats: int
    num_steps: int
    phase: str
    idle_s: float
    has_left: bool

    @staticmethod
    def from_json(text: bytes) -> RankState:
        values = json.loads(text)
        return RankState(**{**values, "process": Process(**values["process"])})


class RankStore:
    """The store as the watchdogs use it. It is not an error if the store does not answer."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._is_gone = False

    def write_state(self, rank: int, state: RankState) -> None:
        text = json.dumps(dataclasses.asdict(state))
        self._ask(lambda store: store.set(_state_key(rank), text))

    def read_state(self, rank: int) -> tuple[bool, RankState | None]:
        """Whether the store answers, and the rank's latest state; None if it has not written one yet."""
        text = self._ask(lambda store: _value(store, _state_key(rank)))
        return text is not None, RankState.from_json(text) if text else None

    def failure(self) -> Failure | None:
        """The first failure that was reported, if any."""
        text = self._ask(lambda store: _value(store, FAILURE_KEY))
        return Failure(**json.loads(text)) if text else None

    def report(self, failure: Failure) -> Failure:
        """Report a failure; returns the first one that was reported, which counts."""
        text = json.dumps(dataclasses.asdict(failure))
        first = self._ask(lambda store: store.compare_set(FAILURE_KEY, "", text))
        return Failure(**json.loads(first)) if first else failure

    def _ask(self, use: Callable[[dist.Store], Answer]) -> Answer | None:
        """The store's answer; None if it gives none. After a broken connection it is not asked again: torch
        prints a page for every attempt."""
        if self._is_gone:
            return None
        try:
            return use(self._store)
        except dist.DistNetworkError:
            self._is_gone = True
        except RuntimeError:
            pass  # a timeout
        return None


def _state_key(rank: int) -> str:
    return f"state/{rank}"


def _value(store: dist.Store, key: str) -> bytes:
    """Empty for a key that is not set, for which :meth:`get` alone would wait."""
    return store.get(key) if store.check([key]) else b""
