"""The rest of ``torch.cuda``: which devices there are, their memory, and waiting for all work."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import torch.utils._device

from tests.gpu.tensor import DEVICE

NUM_DEVICES = 8
CAPABILITY = (8, 0)
NAME = "fake CUDA device"


def install_runtime() -> None:
    """Replace functions of ``torch.cuda``, and of ``torch.Tensor`` where they ask for the current device."""
    # torch looks there for the functions that a default device is meant for. Made at the first use, it would
    # hold the replacements: then transformers does not see that it builds a model on "meta", and leaves the
    # rotary frequencies uninitialised.
    torch.utils._device._device_constructors()
    replacements: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: DEVICE.index,
        "set_device": set_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: DEVICE.synchronise("torch.cuda.synchronize"),
        "empty_cache": lambda: DEVICE.memory.empty_cache(),
        "mem_get_info": memory,
        "memory_allocated": lambda device=None: DEVICE.memory.held,
        "memory_reserved": lambda device=None: DEVICE.memory.allocated,
        "max_memory_allocated": lambda device=None: DEVICE.memory.peak,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch._C._host_emptyCache = lambda: None  # type: ignore[attr-defined]
    for owner, name in ((torch.Tensor, "to"), (torch, "tensor"), (torch, "as_tensor"), (torch, "asarray")):
        setattr(owner, name, _with_index(getattr(owner, name)))
    torch.Tensor.cuda = _cuda  # type: ignore[method-assign]


def set_device(device: Any) -> None:
    index = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= NUM_DEVICES:
        raise RuntimeError("CUDA error: invalid device ordinal")
    DEVICE.index = DEVICE.index if index is None else index


def exchange_device(index: int) -> int:
    """Make a device current and return the previous one. A negative index changes nothing."""
    before = DEVICE.index
    if index >= 0:
        set_device(index)
    return before


def memory(device: Any = None) -> tuple[int, int]:
    """Free and total, in bytes."""
    return DEVICE.memory.free, DEVICE.memory.total


def properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=DEVICE.memory.total,
        multi_processor_count=108,
    )  # fmt: skip


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
    return tensor.to("cuda" if device is None else device, non_blocking=non_blocking)


def _with_index(function: Any) -> Any:
    """The function, told which device is meant by "cuda": torch would ask the guard, which is the CPU's."""

    @functools.wraps(function)
    def asking(*args: Any, **options: Any) -> Any:
        named = {name: _indexed(value) for name, value in options.items()}
        return function(*(_indexed(value) for value in args), **named)

    return asking


def _indexed(value: Any) -> Any:
    if isinstance(value, (str, torch.device)):
        device = torch.device(value)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", DEVICE.index)
    return value
