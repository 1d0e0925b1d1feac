"""What a CUDA graph does, on a CPU: the operations of one run, done again on the same memory.

A function that takes its input from anywhere but that memory answers a replay with what it was once recorded
with; one that asks the device for a number cannot be recorded at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdist.models.passes.graphs import NUM_WARMUPS

# These wait for the device, or copy from memory that a graph does not keep.
FORBIDDEN = ("item", "_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "equal")


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tape: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operation.overloadpacket.__name__
        if name in FORBIDDEN:
            raise RuntimeError(f"{name} is not permitted while recording")
        output = operation(*args, **(kwargs or {}))
        self.tape.append((operation, args, kwargs or {}, output))
        return output


class TapeCapturer:
    """Satisfies :class:`specdist.models.passes.graphs.Capturer`."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def agree(self, is_right: bool) -> bool:
        return is_right

    def has_room(self) -> bool:
        return True

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        for _ in range(NUM_WARMUPS):
            function()
        # Models skip what cannot be recorded, as the check of their input for padding, if they are told.
        with patch("torch.cuda.is_current_stream_capturing", lambda: True), _Recording() as recording:
            output = function()
        self.num_captures += 1

        @torch.inference_mode()
        def replay() -> Tensor:
            self.num_replays += 1
            for operation, args, kwargs, recorded in recording.tape:
                _overwrite(recorded, operation(*args, **kwargs))
            return output

        return replay


def _overwrite(recorded: Any, result: Any) -> None:
    if isinstance(recorded, Tensor):
        # A view shows its base's new numbers already.
        if recorded.data_ptr() != result.data_ptr():
            recorded.copy_(result)
    elif isinstance(recorded, (list, tuple)):
        for one, other in zip(recorded, result, strict=True):
            _overwrite(one, other)
