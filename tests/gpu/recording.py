"""What a capture records and a replay repeats: the same operators on the same memory.

While a stream captures, nothing runs: operators are only written down with the addresses of their tensors. So
a replay reads what is at those addresses by then, and a number that came from the host is the one of the time
of the capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.gpu.operators import Operator, argument

NOT_PERMITTED = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"


def capture_error(message: str, about: str = "") -> RuntimeError:
    """What torch raises for an error of CUDA's."""
    kind = getattr(torch, "AcceleratorError", RuntimeError)
    error: RuntimeError = kind(f"CUDA error: {message}{f' ({about})' if about else ''}")
    return error


class Step(NamedTuple):
    """One operator of a graph: on the host's memory under the device's tensors.

    ``results`` are new tensors, at whose addresses the later steps read.
    """

    function: Callable[..., Any]
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]


class Recording:
    """The operators of one capture.

    They are run as they are recorded, since their results' shapes are asked for; what they wrote to memory of
    others is put back at the end, and what they answered is spoilt, so that only a replay makes it true.
    """

    def __init__(self) -> None:
        self.num_kernels = 0
        self.spoilt: str | None = None
        self._steps: list[Step] = []
        self._own: set[int] = set()
        self._outside: dict[int, weakref.ref[Any]] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def spoilt_by(self, line: str) -> RuntimeError:
        """The error of a call that a capture forbids; from now on the capture can only fail."""
        self.spoilt = line
        return capture_error(NOT_PERMITTED, f"at {line}")

    def add_kernel(self) -> None:
        if self.spoilt is not None:
            raise capture_error(INVALIDATED, f"at {self.spoilt}")
        self.num_kernels += 1

    def use(self, tensors: Iterable[tuple[Tensor, Any]]) -> None:
        """Tensors that an operator takes, with what lives as long as their memory on the device."""
        for tensor, memory in tensors:
            if (key := storage_key(tensor)) not in self._own:
                self._outside[key] = weakref.ref(memory)

    def run(
        self, function: Callable[..., Any], operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        for at in operator.written:
            written = argument(at, args, kwargs)
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                if tensor is not None:  # of an argument that may be left out
                    self._keep(tensor)
        result = function(*args, **kwargs)
        if operator.takes_memory:
            new = operator.new_results(result)
            self._own.update(storage_key(tensor) for tensor in new)
        else:
            new = ()
        if operator.has_kernel:
            self._steps.append(Step(function, operator, args, kwargs, new))
        return result

    def _keep(self, tensor: Tensor) -> None:
        """Remember what is in memory that an operator is about to write to."""
        key = storage_key(tensor)
        if key not in self._own and key not in self._before:
            storage = tensor.untyped_storage()
            self._before[key] = storage, storage.clone()

    def end(self) -> None:
        """Restore all memory, as if nothing had run."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()
        for step in self._steps:
            for result in step.results:
                if result.is_floating_point():
                    result.fill_(torch.nan)

    def replay(self) -> None:
        """Run the operators again on the memory that they were recorded with."""
        if any(memory() is None for memory in self._outside.values()):
            raise RuntimeError("a graph reads or writes memory of a tensor that has been freed")
        for function, operator, args, kwargs, results in self._steps:
            found = function(*args, **kwargs)
            if results:
                for result, new in zip(results, operator.new_results(found), strict=True):
                    result.copy_(new)


def storage_key(tensor: Tensor) -> int:
    """Tensors that share memory have the same."""
    return int(tensor.untyped_storage()._cdata)
