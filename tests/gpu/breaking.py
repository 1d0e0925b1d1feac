"""Ranks with fake GPUs that break: the main job with one fault each, chosen by environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

import specdist.job.ranks.entry
import specdist.job.replica.loaded_models
from specdist.cli import generate
from specdist.job.ranks.signals import end_process
from specdist.models.passes.graphs import CudaGraphs
from specdist.models.passes.runner import ModelRunner
from tests.gpu.device import DEVICE
from tests.gpu.generating import use_fake_device

# The ranks, as digits, and at which of their passes or captures.
RANKS, MOMENT = "BREAKING_RANKS", "BREAKING_MOMENT"
# The exit code of a rank that would start over: here it cannot replace its own program.
STARTS_OVER = 77
Replay = Callable[[], torch.Tensor]


def start(given: Sequence[str]) -> int:
    """Run the job; a rank that would start over ends with that exit code."""
    specdist.job.ranks.entry.start_over = lambda: end_process(STARTS_OVER)
    return generate(given)


def breaks() -> bool:
    return os.environ["RANK"] in os.environ[RANKS]


def joins_on_the_host(given: Sequence[str]) -> int:
    """The draft's rank joins DeepSpeed's broadcast with the random state of the CPU."""
    use_fake_device()
    specdist.job.replica.loaded_models.join_sharding = lambda: torch.distributed.broadcast(
        torch.get_rng_state(), 0
    )
    return start(given)


def out_of_memory_in_a_pass(given: Sequence[str]) -> int:
    use_fake_device()
    forward = ModelRunner.forward
    passes = [0]

    def limited(runner: ModelRunner, *args: Any) -> torch.Tensor:
        passes[0] += 1
        if breaks() and passes[0] == int(os.environ[MOMENT]):
            # After the pass's inputs, in the middle of its layers.
            DEVICE.fail_at(allocation=3, within="models/")
        return forward(runner, *args)

    ModelRunner.forward = limited  # type: ignore[method-assign]
    return start(given)


def out_of_memory_in_a_capture(given: Sequence[str]) -> int:
    use_fake_device()
    if breaks():
        DEVICE.fail_at(capture=int(os.environ[MOMENT]))
    return start(given)


def with_captures(change: Callable[[Replay], Replay], given: Sequence[str]) -> int:
    """The chosen capture of these ranks is what ``change`` makes of it."""
    use_fake_device()
    capture = CudaGraphs.capture
    captures = [0]

    def changed(graphs: CudaGraphs, function: Replay) -> Replay:
        replay = capture(graphs, function)
        captures[0] += 1
        return change(replay) if breaks() and captures[0] == int(os.environ[MOMENT]) else replay

    CudaGraphs.capture = changed  # type: ignore[method-assign]
    return start(given)


def no_capture(given: Sequence[str]) -> int:
    """A library refuses to be captured, on these ranks alone."""

    def refuse(replay: Replay) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    return with_captures(refuse, given)


def wrong_replay(given: Sequence[str]) -> int:
    """A replay of these ranks alone gives other numbers."""
    return with_captures(lambda replay: lambda: replay() + 1, given)


def out_of_memory_before_a_capture(given: Sequence[str]) -> int:
    """In the warm-up passes before it."""
    use_fake_device()
    capture = CudaGraphs.capture
    captures = [0]

    def limited(graphs: CudaGraphs, function: Any) -> Any:
        captures[0] += 1
        if breaks() and captures[0] == int(os.environ[MOMENT]):
            DEVICE.fail_at(allocation=3, within="models/")
        return capture(graphs, function)

    CudaGraphs.capture = limited  # type: ignore[method-assign]
    return start(given)
