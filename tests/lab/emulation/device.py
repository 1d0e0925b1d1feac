"""A GPU that is not there, in virtual time: a queue of passes, its host, and tensors that know of both.

A pass begins when its host has asked for it and all before it is done, and takes the time that it is given.
Asking takes no time; a host that reads a result goes on when the device has it, as with CUDA's streams. The
numbers themselves are computed at once, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NS_PER_MS = 1e6
# What brings a tensor's contents to the host.
READS = frozenset(
    {Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
     Tensor.__index__, Tensor.__array__, Tensor.__contains__}
)  # fmt: skip


@dataclass
class EmulatedDevice:
    """Times are nanoseconds, which only passes and hosts move on.

    Attributes:
        now_ns: of its host.
        free_at_ns: when all that was queued is done.
        passes: begin and end of each, in order.
        num_waits: of the host for the device.
    """

    now_ns: int = 0
    free_at_ns: int = 0
    passes: list[tuple[int, int]] = field(default_factory=list)
    num_waits: int = 0

    def __post_init__(self) -> None:
        self._tensor_type = _tensor_type(self)

    def queue(self, duration_ns: int) -> None:
        """Run something of this duration after all that was queued before. Returns at once."""
        begin = max(self.now_ns, self.free_at_ns)
        self.free_at_ns = begin + duration_ns
        self.passes.append((begin, self.free_at_ns))

    def tensor(self, plain: Tensor) -> Tensor:
        """The result of what was queued: reading it waits, and so does whatever is computed from it."""
        return plain.as_subclass(self._tensor_type)

    def wait(self) -> None:
        """Until all that was queued is done."""
        self.wait_until(self.free_at_ns)

    def wait_until(self, moment_ns: int) -> None:
        self.num_waits += self.now_ns < moment_ns
        self.now_ns = max(self.now_ns, moment_ns)

    def new_event(self) -> EmulatedEvent:
        return EmulatedEvent(self)


@dataclass
class EmulatedEvent:
    """The part of ``torch.cuda.Event`` that the engine uses."""

    device: EmulatedDevice
    at_ns: int = 0

    def record(self) -> None:
        self.at_ns = max(self.device.now_ns, self.device.free_at_ns)

    def query(self) -> bool:
        return self.device.now_ns >= self.at_ns

    def synchronize(self) -> None:
        self.device.wait_until(self.at_ns)

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds."""
        return float((end_event.at_ns - self.at_ns) / NS_PER_MS)


def _tensor_type(device: EmulatedDevice) -> type[Tensor]:
    class EmulatedTensor(Tensor):
        """Of one device: whatever is computed from such tensors is one again, until it is read."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            # A copy that does not block arrives later; whoever needs it waits for an event.
            if func in READS or (func is Tensor.to and kwargs.get("non_blocking")):
                if func in READS:
                    device.wait()
                with torch._C.DisableTorchFunctionSubclass():
                    return func(args[0].as_subclass(Tensor), *args[1:], **kwargs)
            return super().__torch_function__(func, types, args, kwargs)

    return EmulatedTensor
