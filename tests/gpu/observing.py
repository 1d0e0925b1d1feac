"""Who causes which work of the fake device, and what a graph does each time that it is replayed.

The device's own books (books.py) do not know which model's side is at work, nor what is in a graph. Here the
draft's side is whatever runs below ``DraftWorker``; the rest is the target's.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import nn

from tests.gpu.books import PACKAGE, Books
from tests.gpu.device import DEVICE
from tests.gpu.streams import CUDAGraph

DRAFT_SIDE = f"{PACKAGE}engine/draft/draft_worker.py"
SIDES = ("target", "draft")


def side() -> str:
    """Whose work is being done at this moment."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == DRAFT_SIDE:
            return "draft"
        frame = frame.f_back
    return "target"


class Observer:
    """Counts by side while it is active.

    ``counts[side]`` has ``eager kernels``, ``replayed kernels`` (of graphs, at each replay), ``replays``,
    ``graphs``, ``synchronisations``, ``copies`` between host and device, ``eager passes`` and ``replayed
    passes`` of a model.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in SIDES}
        self._models = models
        self._captured: Counter[str] = Counter()
        self._of_graph: dict[int, tuple[CUDAGraph, Counter[str]]] = {}

    def snapshot(self) -> dict[str, Counter[str]]:
        return {name: Counter(counts) for name, counts in self.counts.items()}

    def since(self, before: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
        """What has been counted after a :meth:`snapshot`."""
        return {name: counts - before[name] for name, counts in self.counts.items()}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Counts inside the block. Graphs that were recorded in an earlier block are known."""
        with contextlib.ExitStack() as stack:
            for owner, name, note in (
                (Books, "book_kernel", lambda *_: self._add("eager kernels")),
                (Books, "book_copy", lambda *_: self._add("copies")),
                (Books, "book_synchronisation", lambda *_: self._add("synchronisations")),
                (CUDAGraph, "capture_begin", lambda *_: self._captured.clear()),
                (CUDAGraph, "capture_end", self._note_graph),
                (CUDAGraph, "replay", self._note_replay),
            ):
                stack.enter_context(patch.object(owner, name, _noted(getattr(owner, name), note)))
            for model in self._models:
                handle = model.register_forward_pre_hook(lambda *_: self._add("eager passes"))
                stack.callback(handle.remove)
            yield

    def _add(self, name: str, number: int = 1) -> None:
        """To the graph that is being recorded, or else to the side that is at work."""
        if DEVICE.recording is None:
            self.counts[side()][name] += number
        else:
            self._captured[name.replace("eager", "replayed")] += number

    def _note_graph(self, graph: CUDAGraph, *_: Any) -> None:
        assert graph._recording is not None
        captured = Counter(self._captured)
        captured["replayed kernels"] = graph._recording.num_kernels
        # The graph is kept, so that no other gets its id.
        self._of_graph[id(graph)] = graph, captured
        self.counts[side()]["graphs"] += 1

    def _note_replay(self, graph: CUDAGraph, *_: Any) -> None:
        counts = self.counts[side()]
        counts["replays"] += 1
        counts.update(self._of_graph[id(graph)][1])


def _noted(function: Any, note: Any) -> Any:
    """The method, which tells ``note`` of its arguments and its result, once it has ended."""

    def noted(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        note(*arguments, result)
        return result

    return noted
