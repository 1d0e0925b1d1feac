"""Wall time of several ways to do the same, taken in turn so that a slow minute of the machine hits all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def timed(device: torch.device, action: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds that ``action`` took, whatever it left running on the device included; and what it returned."""
    _synchronize(device)
    begin = time.perf_counter()
    result = action()
    _synchronize(device)
    return time.perf_counter() - begin, result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
