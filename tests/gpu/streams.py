"""Streams, events and graphs as ``torch.cuda`` offers them. All work is done at once, when it is called.

What depends on their order is kept: which stream is current, which is being captured, what an event marks.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu.recording import INVALIDATED, Recording, capture_error
from tests.gpu.tensor import DEVICE

NANOSECONDS_PER_MS = 1e6
ISOLATION = "dependency created on uncaptured work in another stream"
CAPTURED_EVENT = "operation not permitted on an event last recorded in a capturing stream"


class Stream:
    """``torch.cuda.Stream``."""

    _ids = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, *, is_default: bool = False) -> None:
        given = torch.device("cuda" if device is None else device)
        self.device = torch.device("cuda", DEVICE.index if given.index is None else given.index)
        self.priority = priority
        self.cuda_stream = 0 if is_default else next(Stream._ids)

    def synchronize(self) -> None:
        DEVICE.synchronise("torch.cuda.Stream.synchronize")

    def query(self) -> bool:
        DEVICE.refuse_in_capture()
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if DEVICE.recording is not None and self is _Current.stream and not event.is_captured:
            DEVICE.recording.spoilt_by("wait_event")
            raise capture_error(ISOLATION)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """``torch.cuda.Event``: remembers when the host recorded it, by when the work before it was done."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._is_timed = enable_timing
        self._recorded_ns: int | None = None
        self.is_captured = False

    def record(self, stream: Stream | None = None) -> None:
        self.is_captured = DEVICE.recording is not None and (stream is None or stream is _Current.stream)
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _Current.stream).wait_event(self)

    def synchronize(self) -> None:
        self._refuse_if_captured()
        DEVICE.synchronise("torch.cuda.Event.synchronize")

    def query(self) -> bool:
        self._refuse_if_captured()
        DEVICE.refuse_in_capture()
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to the other; both were recorded with timing, and are done."""
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_ns - self._recorded_ns) / NANOSECONDS_PER_MS

    def _refuse_if_captured(self) -> None:
        if self.is_captured:
            raise capture_error(CAPTURED_EVENT)


class CUDAGraph:
    """``torch.cuda.CUDAGraph``: what a capture recorded."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recording: Recording | None = None
        self._stream: Stream | None = None
        self._is_ready = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        if DEVICE.recording is not None:
            raise DEVICE.recording.spoilt_by("capture_begin")
        if self._recording is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        if _Current.stream.cuda_stream == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._stream, self._pool = _Current.stream, pool
        self._recording = DEVICE.recording = Recording()
        DEVICE.memory.begin_capture()

    def capture_end(self) -> None:
        recording, DEVICE.recording = self._recording, None
        if recording is None or self._is_ready:
            raise capture_error("invalid argument", "no capture is under way")
        recording.end()
        DEVICE.memory.end_capture(self._pool, recording.num_kernels)
        if _Current.stream is not self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if recording.spoilt is not None:
            raise capture_error(INVALIDATED, f"at {recording.spoilt}")
        self._is_ready = True
        DEVICE.books.book_capture(recording.num_kernels)

    def replay(self) -> None:
        if not self._is_ready or self._recording is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        DEVICE.refuse_in_capture()
        DEVICE.books.book_replay()
        with _disable_current_modes():
            self._recording.replay()

    def reset(self) -> None:
        self._recording, self._is_ready = None, False

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class _Current:
    """The stream that this process works on."""

    stream: Stream


def current_stream(device: Any = None) -> Stream:
    return _Current.stream


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _Current.stream = stream


def is_current_stream_capturing() -> bool:
    return DEVICE.recording is not None


def install_streams() -> None:
    """Torch's own ``torch.cuda.stream`` and ``torch.cuda.graph`` then work with these."""
    default = Stream(is_default=True)
    _Current.stream = default
    pools = itertools.count(1)
    replacements: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "current_stream": current_stream,
        "default_stream": lambda device=None: default,
        "set_stream": set_stream,
        "is_current_stream_capturing": is_current_stream_capturing,
        "graph_pool_handle": lambda: (0, next(pools)),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
