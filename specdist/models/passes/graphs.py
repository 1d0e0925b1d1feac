"""CUDA graphs: passes of fixed shapes, recorded once and replayed, and the check that a replay is correct.

N tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specdist.utils.host import GIB, MIB
from specdist.utils.trial import agreed, tolerance_of

# The first runs may allocate workspaces or choose algorithms, which must not be recorded.
NUM_WARMUPS = 2
# Every graph takes memory besides the shared pool; further shapes run without a graph.
MAX_GRAPHS = 128
# Recorded graphs after which the log says what they take.
FIRST_GRAPHS = 16

# The largest difference of a replay from the pass itself, and what is permitted.
Difference = Callable[[Tensor, Tensor], tuple[float, float]]

# While one buffer is being copied, the next pass fills another; the host may be many draft steps ahead of the
# device, so more buffers are made when all are in flight, up to a bound.
NUM_HOST_BUFFERS = 3
MAX_HOST_BUFFERS = 32

logger = logging.getLogger(__name__)


class WarmUpError(Exception):
    """The function itself failed before anything was recorded; its error is the cause."""


class GraphMemory:
    """What the models of one GPU may take for recorded graphs, beside tensors.

    CUDA says of no graph what it takes, so everything counts that is taken outside of torch's allocator from
    here on: kernels that are loaded at their first use, too.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self._device = device
        self._most_bytes = most_bytes
        self._begin_bytes = self._taken_bytes()
        self._grown_bytes = self._largest_bytes = self._num_graphs = 0
        self._is_full = False

    def has_room(self) -> bool:
        """Whether another graph fits that is as large as the largest so far. To be called before each."""
        if self._is_full:
            return False
        grown_bytes = self._taken_bytes() - self._begin_bytes
        self._largest_bytes = max(self._largest_bytes, grown_bytes - self._grown_bytes)
        self._grown_bytes = grown_bytes
        if self._num_graphs == FIRST_GRAPHS:
            logger.info("CUDA graphs: %s", str(self))
        if grown_bytes + self._largest_bytes > self._most_bytes:
            self._is_full = True
            logger.warning(
                "no further passes are recorded as CUDA graphs, so that memory does not run out: %s. Other "
                "shapes run slower; a lower --cache_memory leaves more",
                str(self),
            )
            return False
        self._num_graphs += 1
        return True

    def __str__(self) -> str:
        return (
            f"{self._num_graphs} have taken {self._grown_bytes / GIB:.2f} of the "
            f"{self._most_bytes / GIB:.2f} GiB that they may take beside tensors, up to "
            f"{self._largest_bytes / MIB:.1f} MiB each"
        )

    def _taken_bytes(self) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes - torch.cuda.memory_reserved(self._device)


class CudaGraphs:
    """CUDA graphs of one runner. They run one at a time and keep nothing between runs, so they share
    memory.

    Attributes:
        memory: that they may take beside tensors, shared with other runners of the device; None is all.
    """

    memory: GraphMemory | None = None

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """``group``: the ranks that share the model; None for a whole model."""
        self._device = device
        self._group = group
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._outputs: dict[tuple[torch.dtype, int], Tensor] = {}

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record a function whose inputs and outputs keep their addresses; returns its replay, whose result
        is valid until the next replay of any function.

        Raises :class:`WarmUpError` if the function fails in one of its ``NUM_WARMUPS`` runs before.
        """
        with torch.cuda.device(self._device):
            return self._capture(function)

    def agree(self, is_right: bool) -> bool:
        """Whether it is right on all ranks that share the model. All of them call it at the same time."""
        return agreed(self._group, is_right)

    def has_room(self) -> bool:
        """Whether this rank's memory holds the graph of a capture that is about to begin."""
        return self.memory is None or self.memory.has_room()

    def _capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            try:
                for _ in range(NUM_WARMUPS):
                    result = function()
            except Exception as error:
                raise WarmUpError from error
            output = self._output_like(result)
            del result
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that monitors collectives, may use the device meanwhile.
        # torch.cuda.graph leaves its stream current if it cannot end the capture: the outer block does not.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            output.copy_(function())

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _output_like(self, result: Tensor) -> Tensor:
        """One buffer, outside the pool, for the results of all graphs of one width."""
        num_rows, width = result.shape
        key = (result.dtype, width)
        held = self._outputs.get(key)
        if held is None or len(held) < num_rows:
            # Graphs that were recorded earlier keep using the smaller buffer.
            held = self._outputs[key] = torch.empty_like(result)
        return held[:num_rows]


class CheckedGraphs:
    """Runs functions by key: the first run records and checks, later ones replay.

    If recording fails or a replay differs, nothing is replayed any more: the functions then run unrecorded,
    with the same shapes. Ranks that share a model do so together, since a collective must be either captured
    or not on all of its ranks (NCCL, "Using NCCL with CUDA Graphs"). So a key's first run takes as many runs
    of the function, and of its collectives, on every rank, and no rank replays before all have recorded.
    Where one of them has no memory for more graphs, none records more.

    Memory that runs out is an error like in any other pass.
    """

    def __init__(self, capturer: CudaGraphs | None, max_graphs: int = MAX_GRAPHS) -> None:
        """``capturer``: None runs every function unrecorded."""
        self._capturer = capturer
        self._max_graphs = max_graphs if capturer is not None else 0
        self._replays: dict[Hashable, Callable[[], Tensor]] = {}
        self._seen: set[Hashable] = set()

    @property
    def is_full(self) -> bool:
        """No other key will be recorded."""
        return len(self._seen) >= self._max_graphs

    def is_known(self, key: Hashable) -> bool:
        return key in self._replays

    def is_settled(self, key: Hashable) -> bool:
        """A run of it is one of the function, or of its recording."""
        return self.is_full or key in self._seen

    def run(
        self, key: Hashable, function: Callable[[], Tensor], difference: Difference | None = None
    ) -> Tensor:
        """The function's result [N, V], valid until the next run. ``difference``: by default of logits."""
        replay = self._replays.get(key)
        if replay is not None:
            return replay()
        if key in self._seen or self.is_full:
            return function()
        capturer = self._capturer
        if capturer is not None and not capturer.agree(capturer.has_room()):
            self._max_graphs = 0
            return function()
        self._seen.add(key)
        expected = function().clone()
        if capturer is None:
            for _ in range(NUM_WARMUPS + 1):
                function()
        else:
            self._record(capturer, key, function, expected, difference or difference_of_logits)
        return expected

    def _record(
        self,
        capturer: CudaGraphs,
        key: Hashable,
        function: Callable[[], Tensor],
        expected: Tensor,
        difference: Difference,
    ) -> None:
        reason, replay = "another rank of the model cannot record it, or its replay differs", None
        try:
            replay = capturer.capture(function)
        except WarmUpError as failure:
            # Other ranks are in the middle of this run: the pass has failed.
            assert failure.__cause__ is not None
            raise failure.__cause__ from None
        except Exception as failure:
            shortage = shortage_of_memory(failure)
            if shortage is not None:
                raise shortage from None
            reason = f"it cannot be recorded: {type(failure).__name__}: {failure}"
        if not capturer.agree(replay is not None):
            self._give_up(key, reason)
            function()
            return
        assert replay is not None
        error, largest = difference(replay(), expected)
        # Not "error > tolerance": NaN is also wrong.
        is_right = error <= largest
        if not is_right:
            reason = f"its replay differs from the pass itself by {error:.3g}, more than {largest:.3g}"
        if capturer.agree(is_right):
            self._replays[key] = replay
        else:
            self._give_up(key, reason)

    def _give_up(self, key: Hashable, reason: str) -> None:
        self._capturer = None
        self._replays.clear()
        logger.warning("passes run without graphs from now on: of %s: %s", key, reason)


def shortage_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The error of the device's memory that is behind this one: ending the capture may raise one of its own,
    which would not tell that a smaller batch might succeed."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error


def difference_of_logits(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest difference, and what is permitted. Results that are not finite, as with a damaged weight,
    must be the same."""
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    error = float((found - expected).masked_fill_(is_same, 0.0).abs().max())
    largest = max(1.0, float(expected.masked_fill(~expected.isfinite(), 0.0).abs().max()))
    return error, tolerance_of("pass", expected.dtype) * largest


class NothingInFlight:
    """The events of a host, as :class:`torch.cuda.Event`: a copy is complete when its call returns."""

    def record(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Does nothing."""


class InputStaging:
    """A ring of pinned host buffers for one int32 buffer on the device.

    A buffer is reused only after its last copy is complete, since the device reads from it until then.
    """

    def __init__(self, size: int, device: torch.device, new_event: Callable[[], Any] | None = None) -> None:
        is_cuda = device.type == "cuda"
        self._is_pinned = is_cuda
        self._new_event = new_event or (torch.cuda.Event if is_cuda else NothingInFlight)
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._ring = [self._new_host_buffer() for _ in range(NUM_HOST_BUFFERS)]
        self._next = 0

    def _new_host_buffer(self) -> tuple[Tensor, Any]:
        size = len(self.buffer)
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._is_pinned), self._new_event()

    def host(self) -> np.ndarray:
        """The host buffer to fill for the next :meth:`send`, int32 [size]."""
        tensor, arrived = self._ring[self._next]
        if not arrived.query():
            if len(self._ring) < MAX_HOST_BUFFERS:
                self._ring.insert(self._next, self._new_host_buffer())
                tensor, _ = self._ring[self._next]
            else:
                arrived.synchronize()
        return tensor.numpy()

    def send(self, length: int) -> Tensor:
        """Copy the first ``length`` numbers of the host buffer to the device's, which is returned."""
        tensor, arrived = self._ring[self._next]
        self.buffer[:length].copy_(tensor[:length], non_blocking=True)
        arrived.record()
        self._next = (self._next + 1) % len(self._ring)
        return self.buffer
