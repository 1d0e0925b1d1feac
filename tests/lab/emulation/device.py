"""A GPU that is not there: a queue of passes on the monotonic clock, and tensors that know of it.

A pass begins when the device has done all before it, and takes the time that it is given. Queueing one
returns at once; whoever reads a result on the host waits until the device would have it, as with CUDA's
streams. The numbers themselves are computed at once, on the CPU. That work stands in for the device's; it is
measured, so that a result can say where it took longer than the pass that it stands for.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator
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
    """Times are nanoseconds of ``time.monotonic_ns``, which all processes of a machine share.

    Attributes:
        free_at_ns: when all that was queued is done.
        passes: begin and end of each, in order, without those that took no time.
        stand_in_ns: the CPU's work in the device's place so far.
        num_slow: passes for which that work took longer than the pass itself.
    """

    free_at_ns: int = 0
    passes: list[tuple[int, int]] = field(default_factory=list)
    stand_in_ns: int = 0
    num_slow: int = 0
    # Of the last pass: its duration, and the stand-in's work before it.
    _last: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self._tensor_type = _tensor_type(self)

    def queue(self, duration_ns: int, asked_ns: int = 0) -> None:
        """Run something of this duration after all that was queued before. Returns at once.

        ``asked_ns``: when the host asked for it, before the duration was worked out; no real host does that.
        """
        self._close_last()
        begin = max(asked_ns or time.monotonic_ns(), self.free_at_ns)
        self.free_at_ns = begin + duration_ns
        if duration_ns:
            self.passes.append((begin, self.free_at_ns))
            self._last = duration_ns, self.stand_in_ns

    def tensor(self, plain: Tensor) -> Tensor:
        """The result of what was queued: reading it waits, and so does whatever is computed from it."""
        return plain.as_subclass(self._tensor_type)

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Count the CPU's work inside as the device's."""
        begin = time.monotonic_ns()
        yield
        self.stand_in_ns += time.monotonic_ns() - begin

    def wait(self) -> None:
        """Until all that was queued is done."""
        self.wait_until(self.free_at_ns)

    def wait_until(self, moment_ns: int) -> None:
        """Spin until this moment, as CUDA does by default; other threads run meanwhile.

        A host that sleeps for a pass's time begins late, and with cold caches: on a virtual machine what it
        does next took 4 to 13 times as long.
        """
        while time.monotonic_ns() < moment_ns:
            select.select((), (), (), 0)

    def forget(self) -> None:
        """Begin anew: nothing is queued, and nothing has been counted."""
        self.free_at_ns = self.stand_in_ns = self.num_slow = 0
        self.passes, self._last = [], (0, 0)

    def _close_last(self) -> None:
        duration_ns, before_ns = self._last
        self.num_slow += duration_ns > 0 and self.stand_in_ns - before_ns > duration_ns
        self._last = 0, 0

    def new_event(self) -> EmulatedEvent:
        return EmulatedEvent(self)


class EmulatedEvent:
    """The part of ``torch.cuda.Event`` that the engine uses."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._at_ns = 0

    def record(self) -> None:
        self._at_ns = max(time.monotonic_ns(), self._device.free_at_ns)

    def query(self) -> bool:
        return time.monotonic_ns() >= self._at_ns

    def synchronize(self) -> None:
        self._device.wait_until(self._at_ns)

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds."""
        return float((end_event._at_ns - self._at_ns) / NS_PER_MS)


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
            with device.standing_in():
                return super().__torch_function__(func, types, args, kwargs)

    return EmulatedTensor
