"""The checks of test_rules.py on captures and replays; each runs in a process with a fake device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdist.models.loading.memory import device_memory
from specdist.models.passes.graphs import CheckedGraphs, CudaGraphs
from tests.gpu.check_rules import GPU, counts_of, recorded_event, refusal_of
from tests.gpu.device import DEVICE
from tests.gpu.memory import DeviceMemory
from tests.gpu.recording import INVALIDATED, NOT_PERMITTED
from tests.gpu.streams import CAPTURED_EVENT, ISOLATION


def capture(function: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A graph of what the function does."""
    graph = torch.cuda.CUDAGraph()
    outer = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            function()
    finally:
        # torch leaves the stream of a capture that could not be ended current.
        torch.cuda.set_stream(outer)
    return graph


def check_refusals() -> None:
    """Whatever makes the host wait is refused, and so are copies that the device cannot do by itself."""
    x, host, index = torch.arange(6.0, device=GPU), torch.arange(6), torch.tensor([1, 2])
    pinned, before = torch.zeros(6, pin_memory=True), recorded_event()
    graph = capture(lambda: x + 1)
    waiting: list[Callable[[], Any]] = [
        lambda: float(x.sum()),
        lambda: x[x > 2],
        lambda: x[index],
        lambda: x.copy_(pinned),
        lambda: pinned.copy_(x),
        x.tolist,
        torch.cuda.current_stream().synchronize,
        before.synchronize,
        before.query,
        graph.replay,
        lambda: capture(lambda: x + 1),
    ]
    for number, function in enumerate(waiting):
        said: list[str] = []
        refusal = refusal_of(
            lambda function=function, said=said: capture(lambda: said.append(refusal_of(function)))
        )
        assert NOT_PERMITTED in said[0], number
        # After that the capture can only fail.
        assert INVALIDATED in refusal, number
    for function in (lambda: x.copy_(host), lambda: host.copy_(x), x.cpu, lambda: torch.tensor(1.0).to(GPU)):
        assert "unless the CPU tensor is pinned" in refusal_of(lambda function=function: capture(function))
    assert INVALIDATED in refusal_of(lambda: capture(lambda: (refusal_of(x.tolist), x + 1)))
    said = []
    refusal_of(
        lambda: capture(
            lambda: said.append(refusal_of(lambda: torch.cuda.current_stream().wait_event(before)))
        )
    )
    assert ISOLATION in said[0]
    assert "non-default stream" in refusal_of(lambda: torch.cuda.CUDAGraph().capture_begin())
    assert "without a preceding successful capture" in refusal_of(torch.cuda.CUDAGraph().replay)
    inside = torch.cuda.Event()
    capture(inside.record)
    assert CAPTURED_EVENT in refusal_of(inside.synchronize)
    assert not torch.cuda.is_current_stream_capturing() and DEVICE.recording is None


def check_replays() -> None:
    """A replay uses the host's numbers as they were at the capture, and the tensors as they are now."""
    x, output = torch.arange(3.0, device=GPU), torch.zeros(3, device=GPU)
    pinned, scale, number, kept = torch.ones(3, pin_memory=True), [2.0], torch.tensor(10.0), []

    def function() -> None:
        assert torch.cuda.is_current_stream_capturing()
        kept.append(x * scale[0] + number)
        output.copy_(kept[0])
        output.add_(torch.empty(3, device=GPU).copy_(pinned, non_blocking=True))
        x.add_(1.0)

    counts = counts_of(lambda: kept.append(capture(function)))
    result, graph = kept
    assert counts.captured_kernels == (6,) and counts.num_kernels == 0
    # A capture runs nothing.
    assert x.tolist() == [0, 1, 2] and output.tolist() == [0, 0, 0] and result.isnan().all()
    graph.replay()
    assert output.tolist() == [11, 13, 15] and x.tolist() == [1, 2, 3] and result.tolist() == [10, 12, 14]
    # Numbers of the host are frozen; pinned memory is read when the graph runs.
    scale[0] = 100.0
    number.fill_(1000.0)
    pinned.fill_(5.0)
    graph.replay()
    assert output.tolist() == [17, 19, 21] and x.tolist() == [2, 3, 4]
    # Another tensor of that name is another address.
    before, x = x, torch.full((3,), 50.0, device=GPU)
    counts = counts_of(graph.replay)
    assert output.tolist() == [19, 21, 23] and x.tolist() == [50, 50, 50] and before.tolist() == [3, 4, 5]
    assert (counts.num_replays, counts.num_kernels, counts.num_synchronisations) == (1, 0, 0)


def check_freed_memory() -> None:
    """A graph keeps addresses, not tensors."""
    held = [torch.arange(3.0, device=GPU)]
    graph = capture(lambda: held[0][1:] + torch.empty(2, device=GPU).fill_(1.0))
    graph.replay()
    held = [held[0][:1]]
    graph.replay()
    held.clear()
    assert "has been freed" in refusal_of(graph.replay)


def check_project_graphs() -> None:
    """The project's own graphs on it: right replays, one buffer for all graphs, and the checks of both."""
    x, frozen = torch.arange(4.0, device=GPU), [1.0]
    graphs = CudaGraphs(GPU)
    first, second = (
        graphs.capture(lambda offset=offset: x.view(2, 2) * 2 + offset)  # type: ignore[misc]
        for offset in (1.0, 5.0)
    )
    result = first()
    assert result.tolist() == [[1, 3], [5, 7]]
    x.add_(1)
    assert second().tolist() == [[7, 9], [11, 13]] == result.tolist(), "they share a buffer"

    checked = CheckedGraphs(graphs)

    def with_host_value() -> Tensor:
        # Not the same in the pass, in the warm-ups and in the capture.
        frozen[0] += 1
        return x.view(2, 2) + frozen[0]

    assert checked.run("fresh", with_host_value).tolist() == [[3, 4], [5, 6]]
    assert checked._capturer is None, "a replay that differs from the pass gives graphs up"

    checked = CheckedGraphs(graphs)
    stream = torch.cuda.current_stream()
    checked.run(
        "waits",
        lambda: x.view(2, 2) * (1.0 if torch.cuda.is_current_stream_capturing() is False else float(x.sum())),
    )
    assert checked._capturer is None
    assert torch.cuda.current_stream() is stream, "the stream of a failed capture is not left current"
    assert checked.run("waits", lambda: x.view(2, 2)).tolist() == [[1, 2], [3, 4]]


def check_memory() -> None:
    """What the allocator had stays taken until it is released, a capture's is in its pool, a peak is kept."""
    memory = DEVICE.memory = DeviceMemory()
    memory.total, memory.others, memory.kernel = 5000, 1000, 100
    first = torch.empty(200, device=GPU)
    second = first[1:], torch.empty(100, device=GPU)
    del first
    assert torch.cuda.mem_get_info() == (2800, 5000), "a view holds all of it"
    del second
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (0, 1200)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(GPU) == (4000, 5000) and torch.cuda.max_memory_allocated() == 1200
    x = torch.zeros(10, device=GPU)
    graph = capture(lambda: x.add_(torch.ones(100, device=GPU).sum()))
    torch.cuda.empty_cache()
    assert memory.of_graphs == 300
    assert torch.cuda.memory_reserved() == 40 + 404 and memory.free == 4000 - 444 - 300
    graph.replay()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1000, device=GPU)
    assert memory.peak_taken == 1200 and memory.held == 40
    assert torch.empty(700, device=GPU).is_cuda


def check_free_memory_is_what_the_allocator_can_give_back() -> None:
    before = device_memory(GPU)
    for _ in range(2):
        torch.empty(1000, device=GPU)
    assert torch.cuda.mem_get_info(GPU)[0] < before.free_bytes and device_memory(GPU) == before
