"""Lets a build of torch without CUDA work on tensors that say that they are on a CUDA device.

Before many operators torch asks the *device guard* of a tensor's device type to make that device current. It
looks the guard up in a table that has no entry for CUDA in a CPU build. The CPU's own guard does nothing, and
nothing is all that a guard has to do here, so it is entered for CUDA as well. That takes no compiler.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

# c10::impl::device_guard_impl_registry, an array with a pointer for every c10::DeviceType.
REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
CPU, CUDA = 0, 1


def why_not() -> str | None:
    """The reason why this process cannot have a fake device; None if it can."""
    if torch.backends.cuda.is_built():
        return "this torch was built with CUDA: the fake device replaces what only a CPU build lacks"
    try:
        _registry()
    except (OSError, ValueError) as error:
        return f"this torch ({torch.__version__}) keeps its device guards elsewhere: {error}"
    return None


def install_guard() -> None:
    """Raises RuntimeError where that is impossible."""
    if (reason := why_not()) is not None:
        raise RuntimeError(reason)
    registry = _registry()
    assert registry[CPU], "torch registers the CPU's guard when it is imported"
    registry[CUDA] = registry[CPU]


def _registry() -> ctypes.Array[ctypes.c_void_p]:
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    return (ctypes.c_void_p * (CUDA + 1)).in_dll(library, REGISTRY)
