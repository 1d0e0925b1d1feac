"""The fake device itself: its tensors, and what happens at each operator on them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.books import Books, Counts, project_line
from tests.gpu.memory import DeviceMemory
from tests.gpu.operators import COPYING, Operator, argument, operator_of, waits, why_devices_differ
from tests.gpu.recording import Recording, storage_key
from tests.kernels.plain import ON_HOST

CPU = torch.device("cpu")
# The plain implementation of scaled-dot-product attention, which any device can run.
MATH_ATTENTION = 0
UNPINNED_IN_CAPTURE = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
    "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)


class Memory:
    """Memory of the device that tensors share."""

    def __init__(self, num_bytes: int) -> None:
        DEVICE.memory.hold(num_bytes)
        self._num_bytes = num_bytes

    def __del__(self) -> None:
        DEVICE.memory.release(vars(self).get("_num_bytes", 0))


_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


class CudaTensor(torch.Tensor):
    """Claims to be on a CUDA device; its values are in ``host``, a tensor on the CPU.

    Views of one tensor share the memory of one host tensor, as views do, and the object ``memory``, which is
    gone when the last of them is.
    """

    host: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, host: Tensor, index: int = 0) -> CudaTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=torch.device("cuda", index),
        )
        tensor.host = host
        tensor.memory = _memory_of(host)
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CudaTensor({self.host!r}, device='{self.device}')"

    def tolist(self) -> Any:
        DEVICE.synchronise("D2H of tolist()")
        return self.host.tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, CudaTensor):
            raise RuntimeError("incompatible tensor type: a CUDA tensor's data cannot lie on the host")
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.host, self.memory = value.host, value.memory

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DEVICE.run(function, args, kwargs or {})


def _histogram(numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Also of integers, which a CPU's lacks."""
    return torch.histc(numbers.float(), *args, **kwargs).to(numbers.dtype)


def _memory_of(host: Tensor) -> Memory:
    key = storage_key(host)
    memory = _memories.get(key)
    if memory is None:
        memory = _memories[key] = Memory(host.untyped_storage().nbytes())
    return memory


class FakeDevice(TorchDispatchMode):
    """Runs every operator on the values on the host, by the device's rules, and counts the work.

    Attributes:
        books: what was done since :meth:`reset`; :meth:`counts` reads them.
        index: of the device that is current in this process.
        memory: of the device, as far as this process takes it.
        recording: the capture that is under way on the current stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.index = 0
        self.memory = DeviceMemory()
        self.recording: Recording | None = None
        # Held for good, so that no other memory gets the address of a pinned one.
        self._pinned: dict[int, torch.UntypedStorage] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would otherwise check that at every operator, which is slow."""
        return False

    def reset(self) -> None:
        """Count from zero."""
        self.books.reset()

    def counts(self) -> Counts:
        """The work since the last :meth:`reset`."""
        return self.books.counts()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether memory of the host is such that the device can copy from and to it by itself."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._pinned

    def synchronise(self, reason: str) -> None:
        """The host waits for the device."""
        self.refuse_in_capture()
        self.books.book_synchronisation(reason)

    def check_current(self, index: int | None, work: str) -> None:
        """Torch's own operators make their tensors' device current; Triton's kernels do not."""
        if index is not None and index != self.index:
            raise RuntimeError(
                f"{work} for cuda:{index}, while cuda:{self.index} is current, at {project_line()}: "
                "torch.cuda.set_device() comes first"
            )

    def refuse_in_capture(self) -> None:
        """Raise CUDA's error for a call that a capture forbids, and invalidate the capture."""
        if self.recording is not None:
            raise self.recording.spoilt_by(project_line())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(function, args, kwargs or {})

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = operator_of(function)
        tensors = list(_tensors(args))
        tensors += _tensors(kwargs.values())
        index = next((tensor.device.index for tensor in tensors if isinstance(tensor, CudaTensor)), None)
        takes_cuda = index is not None
        if (device := kwargs.get("device")) is not None:
            device = torch.device(device)
            index = None if device.type != "cuda" else self.index if device.index is None else device.index
        if not takes_cuda and index is None:
            return self._run_on_host(function, operator, args, kwargs)
        if function.namespace == "c10d":
            raise RuntimeError(f"{function} got a CUDA tensor, and NCCL is not faked, at {project_line()}")
        if (reason := why_devices_differ(operator, args, tensors)) is not None:
            raise RuntimeError(f"{reason} ({function} at {project_line()})")
        self._account(operator, args, kwargs, tensors, index)
        return self._run_on_device(function, operator, args, kwargs, tensors, index)

    def _run_on_host(
        self, function: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """No device tensor takes part; but memory may be pinned for the device."""
        if operator.name == "is_pinned":
            return self.is_pinned(args[0])
        wants_pinned = kwargs.get("pin_memory") or operator.name == "_pin_memory"
        if not wants_pinned:
            return function(*args, **kwargs)
        result = (
            args[0].clone()
            if operator.name == "_pin_memory"
            else function(*args, **kwargs | {"pin_memory": False})
        )
        self._pin(result)
        return result

    def _pin(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage

    def _account(
        self,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        index: int | None,
    ) -> None:
        """Count the operator's work, or raise an error if it is not possible now."""
        if operator.name == "copy_":
            is_asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._book_copy(args[1], args[0], args[0].is_cuda, is_asynchronous)
        elif operator.name == "_to_copy":
            self._book_copy(args[0], None, index is not None, kwargs.get("non_blocking", False))
        else:
            for reason in waits(operator, args, kwargs):
                self.synchronise(reason)
            if operator.has_kernel and index is not None:
                self.launch()

    def launch(self) -> None:
        """Queue a kernel, or add it to the capture that is under way."""
        if self.recording is None:
            self.books.book_kernel()
        else:
            self.recording.add_kernel()

    def _book_copy(self, source: Tensor, target: Tensor | None, to_cuda: bool, is_asynchronous: bool) -> None:
        """``target``: None is allocated for the copy; on the host it is then pinned, if need be."""
        if source.is_cuda and to_cuda:
            self.launch()
            return
        direction, on_host = ("D2H", target) if source.is_cuda else ("H2D", source)
        is_pinned = is_asynchronous if on_host is None else self.is_pinned(on_host)
        if self.recording is not None:
            if not is_pinned:
                raise RuntimeError(f"{UNPINNED_IN_CAPTURE} ({direction} at {project_line()})")
            if is_asynchronous:
                self.recording.add_kernel()
        # Pageable memory is staged on its way to the device, and waited for on its way back.
        is_blocking = not is_asynchronous or (source.is_cuda and not is_pinned)
        memory = "pinned" if is_pinned else "pageable"
        kind = f"{direction}, {memory}, {'blocking' if is_blocking else 'asynchronous'}"
        if is_blocking:
            self.synchronise(kind)
        if self.recording is None:
            self.books.book_copy(kind)

    def _run_on_device(
        self,
        function: Any,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        index: int | None,
    ) -> Any:
        host_args = tuple(_on_host(value) for value in args)
        host_kwargs = {name: _on_host(value) for name, value in kwargs.items()}
        run: Any = function
        if function.namespace == "specdist":
            self.check_current(index, str(function))
            run = ON_HOST[operator.name]
        elif operator.name == "histc":
            run = _histogram
        elif operator.name == "_fused_sdp_choice":
            return MATH_ATTENTION
        elif operator.name == "is_pinned":
            return False
        if self.recording is None:
            result = run(*host_args, **host_kwargs)
        else:
            self.recording.use((tensor.host, tensor.memory) for tensor in tensors if tensor.is_cuda)
            frozen = [_frozen(operator, *pair) for pair in zip(args, host_args, strict=True)]
            result = self.recording.run(run, operator, tuple(frozen), host_kwargs)
        if operator.name == "_to_copy" and index is None and kwargs.get("non_blocking"):
            self._pin(result)
        if not operator.written:
            return result if index is None else _on_cuda(result, index)
        for at in operator.written:
            written = argument(at, args, kwargs)
            if isinstance(written, CudaTensor) and written.host.shape != written.shape:
                raise NotImplementedError(f"{function} changes the shape of a fake tensor in place")
        if not operator.returned:
            return None
        results = result if isinstance(result, (tuple, list)) else (result,)
        passed_on = [
            _on_cuda(new, index or 0) if at is None else argument(at, args, kwargs)
            for new, at in zip(results, operator.returned, strict=True)
        ]
        return passed_on[0] if len(passed_on) == 1 else tuple(passed_on)


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _on_host(value: Any) -> Any:
    if isinstance(value, CudaTensor):
        return value.host
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return value


def _frozen(operator: Operator, value: Any, host: Any) -> Any:
    """A number of the host becomes an argument of the kernel with its present value."""
    is_number = isinstance(value, Tensor) and not value.is_cuda and operator.name not in COPYING
    return host.clone() if is_number else host


def _on_cuda(value: Any, index: int) -> Any:
    if isinstance(value, Tensor):
        return value if isinstance(value, CudaTensor) else CudaTensor(value, index)
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cuda(item, index) for item in value)
    return value


DEVICE = FakeDevice()
