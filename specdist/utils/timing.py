"""Wall time of several ways to do the same, taken in turn so that a slow minute of the machine hits all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from specdist.engine.device_clock import settled_ns
from specdist.regression import NS_PER_S

Result = TypeVar("Result")


def timed(device: torch.device, action: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds that ``action`` took, whatever it left running on the device included; and what it returned."""
    begin_ns = settled_ns(device)
    result = action()
    return (settled_ns(device) - begin_ns) / NS_PER_S, result


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads for torch's operations on a CPU; the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
