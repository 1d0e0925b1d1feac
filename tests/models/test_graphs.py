"""A recorded pass is replayed only if its first replay gives the right result."""

import logging
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.graphs import (
    NUM_WARMUPS,
    CheckedGraphs,
    CudaGraphs,
    GraphMemory,
    WarmUpError,
)
from specdist.models.passes.runner import ModelRunner
from tests.engine.harness import paged_runner
from tests.models.chunks import STEPS, TOLERANCE, GrowingRows
from tests.models.families import tiny_model
from tests.models.tape import TapeCapturer

Function = Callable[[], Tensor]


class FakeCapturer:
    """Runs what it recorded, into one buffer for all as a graph does; ``distort`` is what goes wrong with its
    results, ``error`` what recording ends with."""

    def __init__(
        self,
        distort: Callable[[Tensor], Tensor] = lambda result: result,
        error: Exception | None = None,
    ) -> None:
        self._distort, self._error = distort, error
        self.num_captures = 0
        self.num_replays = 0
        self._buffer = torch.zeros(0)

    def agree(self, is_right: bool) -> bool:
        return is_right

    def has_room(self) -> bool:
        return True

    def capture(self, function: Function) -> Function:
        self.num_captures += 1
        if isinstance(self._error, WarmUpError):
            function()
            raise self._error from torch.OutOfMemoryError("CUDA out of memory.")
        for _ in range(NUM_WARMUPS):
            function()
        if self._error is not None:
            raise self._error

        def replay() -> Tensor:
            self.num_replays += 1
            result = self._distort(function())
            if self._buffer.numel() < result.numel():
                self._buffer = torch.zeros(result.numel())
            shared = self._buffer[: result.numel()].view(result.shape)
            return shared.copy_(result)

        return replay


class Counted:
    """A function of a state outside, and how often it ran."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.state = 1.0

    def __call__(self) -> Tensor:
        self.num_runs += 1
        return torch.tensor([[self.state, 2.0]])


def test_a_recorded_function_is_checked_once_and_then_replayed() -> None:
    capturer, function = FakeCapturer(), Counted()
    graphs = CheckedGraphs(capturer)
    for state in (1.0, 5.0, 9.0):
        function.state = state
        assert graphs.run("key", function)[0, 0] == state
    assert (capturer.num_captures, capturer.num_replays) == (1, 3)


def test_a_row_that_is_not_finite_does_not_end_replays() -> None:
    """The pass itself is not finite there; a replay that is not finite elsewhere is wrong."""
    damaged = torch.tensor([[torch.nan, 2.0], [torch.inf, 3.0]])
    graphs = CheckedGraphs(FakeCapturer())
    graphs.run("key", lambda: damaged)
    assert "key" in graphs._replays
    for wrong in (damaged + 1, damaged.flip(0), damaged.nan_to_num(0.0)):
        graphs = CheckedGraphs(FakeCapturer(lambda result, wrong=wrong: wrong))  # type: ignore[misc]
        graphs.run("key", lambda: damaged)
        assert not graphs._replays


FAULTS = {
    "raises": FakeCapturer(error=RuntimeError("operation not permitted when stream is capturing")),
    "differs": FakeCapturer(lambda result: result + 1),
    "nan": FakeCapturer(lambda result: result * torch.nan),
}


@pytest.mark.parametrize("capturer", FAULTS.values(), ids=FAULTS)
def test_one_wrong_replay_ends_all_replays(capturer: FakeCapturer, caplog: pytest.LogCaptureFixture) -> None:
    graphs, function = CheckedGraphs(capturer), Counted()
    with caplog.at_level(logging.WARNING):
        for key in ("a", "a", "b", "b"):
            function.state += 1
            assert graphs.run(key, function)[0, 0] == function.state
    assert capturer.num_captures == 1
    (message,) = caplog.messages
    assert "without graphs from now on" in message


def test_memory_that_runs_out_while_recording_is_told_as_such() -> None:
    """Whoever runs the pass can then make the batch smaller; graphs are not given up."""
    # As where the capture is ended.
    error = RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    graphs = CheckedGraphs(FakeCapturer(error=error))
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run("key", Counted())
    assert graphs._capturer is not None


def test_a_rank_that_gives_up_runs_as_often_as_the_others() -> None:
    """Every pass has collectives that the other ranks wait for."""
    num_runs = []
    for capturer in (FakeCapturer(), *FAULTS.values()):
        graphs, function = CheckedGraphs(capturer), Counted()
        for key in ("a", "a", "b", "c", "b"):
            graphs.run(key, function)
        num_runs.append(function.num_runs)
    assert len(set(num_runs)) == 1


def test_ranks_record_and_give_up_together() -> None:
    """Recorded and other collectives of a group must not mix (NCCL, "Using NCCL with CUDA Graphs")."""
    graphs = CudaGraphs.__new__(CudaGraphs)
    graphs._group = object()  # type: ignore[assignment]
    with patch("torch.distributed.all_reduce", lambda vote, *_, **__: vote.fill_(False)):
        assert not graphs.agree(True), "another rank cannot"
    capturer, function = FakeCapturer(), Counted()
    capturer.agree = lambda is_right: False  # type: ignore[method-assign]
    checked = CheckedGraphs(capturer)
    for key in "aab":
        assert checked.run(key, function)[0, 0] == function.state
    assert not capturer.num_captures, "another rank has no memory for it"


def test_the_number_of_graphs_is_limited() -> None:
    capturer, function = FakeCapturer(), Counted()
    graphs = CheckedGraphs(capturer, max_graphs=2)
    for key in "abcabc":
        graphs.run(key, function)
    assert capturer.num_captures == 2


def test_no_more_is_recorded_than_memory_holds(caplog: pytest.LogCaptureFixture) -> None:
    """What was recorded is replayed; the largest graph so far has to fit once more, whoever records it."""
    taken = iter([100, 100, 160, 170, 280])

    def mem_get_info(device: object) -> tuple[int, int]:
        return 1000 - next(taken) - 7, 1000

    capturer, function = FakeCapturer(), Counted()
    with (
        patch("torch.cuda.mem_get_info", mem_get_info),
        patch("torch.cuda.memory_reserved", lambda device: 7),
        caplog.at_level(logging.WARNING),
    ):
        memory = GraphMemory(torch.device("cuda"), 250)
        capturer.has_room = memory.has_room  # type: ignore[method-assign]
        passes, runs = CheckedGraphs(capturer), CheckedGraphs(capturer)
        for key in "abab":
            passes.run(key, function)
        assert not caplog.messages
        runs.run("c", function)
        passes.run("d", function)
        runs.run("d", function)
        num_runs = function.num_runs
        for key in "ef":
            passes.run(key, function)
            runs.run(key, function)
    assert function.num_runs == num_runs + 4 and capturer.num_captures == 3
    (message,) = caplog.messages
    assert "3 have taken" in message, message
    for graphs, keys in ((passes, "ab"), (runs, "c")):
        assert graphs.is_full and set(graphs._replays) == set(keys)


def static_runner(plain: PreTrainedModel, capturer: TapeCapturer) -> ModelRunner:
    return paged_runner(plain, Acceleration(is_static=True, capturer=capturer))


@pytest.mark.parametrize("family", ["gemma2", "gpt_neo", "youtu"])
def test_replays_of_passes_are_right(family: str) -> None:
    """All that changes from pass to pass is in the buffers: a replay reads nothing else. And what a pass
    returned is not overwritten by later ones."""
    plain, capturer = tiny_model(family), TapeCapturer()
    passes = list(GrowingRows(plain, STEPS, page_size=4).run(static_runner(plain, capturer)))
    assert (capturer.num_captures, capturer.num_replays) == (2, len(STEPS))
    for found, wanted in passes:
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_pass_that_fails_during_warm_up_is_not_repeated() -> None:
    """Ranks that share the model are in the middle of the same run: another one would meet with its rest."""
    function = Counted()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        CheckedGraphs(FakeCapturer(error=WarmUpError())).run("key", function)
    assert function.num_runs == 2  # the pass itself, and the run that failed
