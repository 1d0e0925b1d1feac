"""What the ranks of a replica tell each other through the launcher's key-value store.

Each rank says how it fares, and whoever sees a failure first says which. That store may go before the ranks
do: with the launcher, or with rank 0 where the launcher has none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch.distributed as dist

from specdist.data.heartbeat import Process

FAILURE_KEY = "failure"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Failure:
    """Why a replica ends. ``usage``: an error for the user to read; ``memory``: with a smaller batch it would
    go on; ``missing``: the rank has never come; ``silent``: its process is there, and does nothing;
    ``stalled``: no rank gets on, and ``rank`` is the one that has noticed."""

    kind: Literal["error", "usage", "memory", "missing", "gone", "silent", "stalled"]
    rank: int
    role: str
    reason: str

    def __str__(self) -> str:
        if self.kind in ("missing", "stalled"):
            return self.reason
        return f"rank {self.rank} ({self.role}): {self.reason}"


@dataclass(frozen=True)
class RankState:
    """What a rank tells the others of itself. ``idle_s``: seconds since its last step."""

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
    """The store as the watchdogs use it. It may not answer, which is never an error here."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._is_gone = False

    def write_state(self, rank: int, state: RankState) -> None:
        text = json.dumps(dataclasses.asdict(state))
        self._ask(lambda store: store.set(_state_key(rank), text))

    def read_state(self, rank: int) -> tuple[bool, RankState | None]:
        """Whether the store answers, and what the rank has told last; None if it has told nothing yet."""
        told = self._ask(lambda store: _value(store, _state_key(rank)))
        return told is not None, RankState.from_json(told) if told else None

    def failure(self) -> Failure | None:
        """The one that counts, if any was reported."""
        told = self._ask(lambda store: _value(store, FAILURE_KEY))
        return Failure(**json.loads(told)) if told else None

    def report(self, failure: Failure) -> Failure:
        """The first failure counts; the one that does is the answer."""
        text = json.dumps(dataclasses.asdict(failure))
        told = self._ask(lambda store: store.compare_set(FAILURE_KEY, "", text))
        return Failure(**json.loads(told)) if told else failure

    def _ask(self, use: Callable[[dist.Store], Answer]) -> Answer | None:
        """None if the store does not answer. One that has gone with its process is not asked again: torch
        prints a page for every try."""
        if self._is_gone:
            return None
        try:
            return use(self._store)
        except dist.DistNetworkError:
            self._is_gone = True
        except RuntimeError:
            pass  # it is late
        return None


def _state_key(rank: int) -> str:
    return f"state/{rank}"


def _value(store: dist.Store, key: str) -> bytes:
    """Empty for a key that nobody has set; :meth:`get` alone would wait for it."""
    return store.get(key) if store.check([key]) else b""
