"""The tensors of safetensors files in the order in which they lie there, each byte read once per node.

Each file is read by one rank of those that need it on a node, in large sequential reads and ahead of their
use, into a bounded window of memory that the others map: they copy their parts out of it. Mapping the files
themselves, as safetensors does, makes a parallel file system answer page faults in each rank (SGLang, issue
37806). The window is an anonymous file (memfd), which nobody else sees and which ends with its processes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# By their names in safetensors headers.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
# Of a window, unless a tensor is larger; of a read, and of what the file system is told to fetch ahead of it.
WINDOW_BYTES, READ_BYTES, ADVISED_BYTES = 256 * 2**20, 16 * 2**20, 128 * 2**20
PAGE_BYTES = mmap.PAGESIZE
# Between looks of a rank that waits for others.
MIN_POLL_S, MAX_POLL_S = 0.0001, 0.005
FAILED = -1

Value = TypeVar("Value")


@dataclass
class Reading:
    """What this rank has read from files, for its statistics; ``on_tensor`` is called after every tensor that
    was loaded."""

    num_bytes: int = 0
    on_tensor: Callable[[], None] | None = None


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file; ``begin``: its first byte there."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def tensors_in(path: Path) -> list[FileTensor] | None:
    """The tensors of a file in their order; None if it has numbers that are not known here, or another
    format. Raises OSError and ValueError."""
    if path.suffix != ".safetensors":
        return None
    with path.open("rb") as file:
        (num_header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(num_header_bytes))
    header.pop("__metadata__", None)
    if any(found["dtype"] not in DTYPES for found in header.values()):
        return None
    begin = 8 + num_header_bytes
    tensors = []
    for name, found in header.items():
        first, end = found["data_offsets"]
        tensors.append(FileTensor(path, name, DTYPES[found["dtype"]], tuple(found["shape"]), begin + first))
        if tensors[-1].num_bytes != end - first:
            raise ValueError(f"{path}: {name} has not the size that its shape says")
    return sorted(tensors, key=lambda tensor: tensor.begin)


def streamed(
    files: Sequence[Sequence[FileTensor]],
    *,
    needed: Collection[str] | None = None,
    group: dist.ProcessGroup | None = None,
    reading: Reading | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all files by name, each valid until the next one is asked for.

    All ranks of ``group`` must name the same files; those of a node share what one of them reads, and get
    what any of them has ``needed`` (None: all). Raises OSError on every rank of a node if a file cannot be
    read.
    """
    node = _Node.of(group)
    if needed is not None:
        files = _needed_on_node(files, needed, node, group)
    # All windows of a node together hold no more than a file.
    largest = max((sum(tensor.num_bytes for tensor in file) for file in files), default=0)
    window_bytes = min(window_bytes, largest)
    with contextlib.ExitStack() as stack:
        # Replicas that start together begin at different files.
        first = _start(group) % max(1, len(files))
        files = [*files[first:], *files[:first]]
        own = [tensor for index, file in enumerate(files) for tensor in file if node.reads(index)]
        capacity = max(1, window_bytes // node.size)
        mine = stack.enter_context(_Window.opened(os.memfd_create("weights"), own, node.size, capacity))
        windows = [mine]
        if node.size > 1:
            windows = _windows_of_node(stack, group, node, mine, files, capacity)
        reader = threading.Thread(
            target=mine.fill, args=(reading or Reading(),), name="weight reader", daemon=True
        )
        reader.start()
        try:
            for index, file in enumerate(files):
                window = windows[index % len(windows)]
                for tensor in file:
                    yield tensor.name, window.next()
                    window.done(node.index)
        finally:
            # Nobody waits for a rank that has failed.
            for window in windows:
                window.leave(node.index)
            mine.end()
            reader.join()


@dataclass(frozen=True)
class _Node:
    """The ranks of a group on this machine, by their positions in the group; ``index``: of this one among
    them."""

    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def reads(self, file: int) -> bool:
        """Whether this rank reads a file."""
        return file % self.size == self.index

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> _Node:
        if group is None or dist.get_world_size(group) == 1:
            return _Node((0,), 0)
        machines = _gathered(group, _machine())
        own = dist.get_rank(group)
        ranks = tuple(rank for rank, machine in enumerate(machines) if machine == machines[own])
        # Some containers forbid to open what another process has open: then each rank reads for itself.
        probe = os.memfd_create("probe")
        try:
            places = _gathered(group, f"/proc/{os.getpid()}/fd/{probe}")
            can_share = all(_gathered(group, all(_can_open(places[rank]) for rank in ranks)))
        finally:
            os.close(probe)
        return _Node(ranks, ranks.index(own)) if can_share else _Node((own,), 0)


def _needed_on_node(
    files: Sequence[Sequence[FileTensor]],
    needed: Collection[str],
    node: _Node,
    group: dist.ProcessGroup | None,
) -> list[list[FileTensor]]:
    """What of the files any rank of this node needs."""
    own = bytes(tensor.name in needed for file in files for tensor in file)
    flags = [own] if group is None else _gathered(group, own)
    is_needed = map(any, zip(*(flags[rank] for rank in node.ranks), strict=True))
    return [[tensor for tensor in file if next(is_needed)] for file in files]


def _start(group: dist.ProcessGroup | None) -> int:
    """A number of this replica by chance, the same on all ranks of the group."""
    number = zlib.crc32(f"{_machine()}:{os.getpid()}".encode())
    return number if group is None else _gathered(group, number)[0]


def _can_open(place: str) -> bool:
    try:
        os.close(os.open(place, os.O_RDWR))
    except OSError:
        return False
    return True


def _machine() -> str:
    """Boot and process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"


def _gathered(group: dist.ProcessGroup, value: Value) -> list[Value]:
    found: list[Value] = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _windows_of_node(
    stack: contextlib.ExitStack,
    group: dist.ProcessGroup | None,
    node: _Node,
    mine: _Window,
    files: Sequence[Sequence[FileTensor]],
    capacity: int,
) -> list[_Window]:
    """The windows of all ranks of a node, in their order."""
    assert group is not None
    places = _gathered(group, mine.place)
    windows = []
    for index, rank in enumerate(node.ranks):
        if index == node.index:
            windows.append(mine)
            continue
        tensors = [
            tensor for number, file in enumerate(files) for tensor in file if number % node.size == index
        ]
        other = os.open(places[rank], os.O_RDWR)
        windows.append(stack.enter_context(_Window.opened(other, tensors, node.size, capacity)))
    # Opened by all before any may end.
    dist.barrier(group)
    return windows


class _Window:
    """Memory through which tensors pass one after the other, from one writer to several readers.

    Its first page holds numbers: how many tensors have been written, and how many each reader has finished
    with. They are read and written by system calls, which order them after the tensors' bytes.
    """

    def __init__(
        self, descriptor: int, tensors: Sequence[FileTensor], num_readers: int, num_bytes: int
    ) -> None:
        self._descriptor, self._tensors, self._num_readers = descriptor, tensors, num_readers
        sizes = [-(-tensor.num_bytes // PAGE_BYTES) * PAGE_BYTES for tensor in tensors]
        self._capacity = min(max([num_bytes // PAGE_BYTES * PAGE_BYTES, *sizes]), sum(sizes)) or PAGE_BYTES
        # Where each begins, as if the window had no end: none goes over the end.
        self._begins: list[int] = []
        head = 0
        for size in sizes:
            if head % self._capacity + size > self._capacity:
                head = -(-head // self._capacity) * self._capacity
            self._begins.append(head)
            head += size
        self._ends = [begin + size for begin, size in zip(self._begins, sizes, strict=True)]
        self._next = 0
        self._has_ended = threading.Event()
        os.ftruncate(descriptor, PAGE_BYTES + self._capacity)
        self._memory = mmap.mmap(descriptor, PAGE_BYTES + self._capacity)

    @staticmethod
    @contextlib.contextmanager
    def opened(
        descriptor: int, tensors: Sequence[FileTensor], num_readers: int, num_bytes: int
    ) -> Iterator[_Window]:
        """In an anonymous file, this rank's own or another's."""
        try:
            yield _Window(descriptor, tensors, num_readers, num_bytes)
        finally:
            os.close(descriptor)

    @property
    def place(self) -> str:
        """Where other processes of this machine and user find it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def fill(self, reading: Reading) -> None:
        """Write one tensor after the other, each as soon as there is room."""
        file: int | None = None
        path: Path | None = None
        try:
            for index, tensor in enumerate(self._tensors):
                if path != tensor.path:
                    if file is not None:
                        os.close(file)
                    file, path = os.open(tensor.path, os.O_RDONLY), tensor.path
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                assert file is not None
                if not self._wait(partial(self._has_room, index)):
                    self._set(0, FAILED)
                    return
                self._read(file, index, reading)
                self._set(0, index + 1)
        except OSError:
            self._set(0, FAILED)
        finally:
            if file is not None:
                os.close(file)

    def _read(self, file: int, index: int, reading: Reading) -> None:
        tensor = self._tensors[index]
        start = PAGE_BYTES + self._begins[index] % self._capacity
        target = memoryview(self._memory)[start : start + tensor.num_bytes]
        num_read = 0
        while num_read < tensor.num_bytes:
            offset = tensor.begin + num_read
            os.posix_fadvise(file, offset, ADVISED_BYTES, os.POSIX_FADV_WILLNEED)
            count = os.preadv(file, [target[num_read : num_read + READ_BYTES]], offset)
            if count == 0:
                raise OSError(f"{tensor.path} ends before its tensors do")
            num_read += count
            reading.num_bytes += count

    def next(self) -> Tensor:
        """The next tensor, until it is :meth:`done`."""
        index, tensor = self._next, self._tensors[self._next]
        self._wait(lambda: self._number(0) > index or self._number(0) == FAILED)
        if self._number(0) == FAILED:
            raise OSError(f"{tensor.path} cannot be read")
        if tensor.num_bytes == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        flat = torch.frombuffer(
            self._memory,
            dtype=tensor.dtype,
            count=prod(tensor.shape),
            offset=PAGE_BYTES + self._begins[index] % self._capacity,
        )
        return flat.reshape(tensor.shape)

    def done(self, reader: int) -> None:
        """Its memory may be used again."""
        self._next += 1
        self._set(1 + reader, self._next)

    def leave(self, reader: int) -> None:
        """This reader needs nothing more."""
        self._set(1 + reader, len(self._tensors))

    def end(self) -> None:
        """Nothing more is written: readers that wait fail."""
        self._has_ended.set()

    def _has_room(self, index: int) -> bool:
        first = min(self._number(1 + reader) for reader in range(self._num_readers))
        return first >= index or self._ends[index] - self._begins[first] <= self._capacity

    def _wait(self, is_true: Callable[[], bool]) -> bool:
        poll_s = MIN_POLL_S
        while not is_true():
            if self._has_ended.is_set():
                return False
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, MAX_POLL_S)
        return True

    def _number(self, index: int) -> int:
        return int.from_bytes(os.pread(self._descriptor, 8, 8 * index), "little", signed=True)

    def _set(self, index: int, value: int) -> None:
        os.pwrite(self._descriptor, value.to_bytes(8, "little", signed=True), 8 * index)
