"""Wall time of several ways to do the same, taken in turn so that a slow minute of the machine hits all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads for torch's operations on a CPU; the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
