"""One direction of a link between two ranks: a Unix socket on one machine, else the process group.

Gloo hands every message to threads of its own and waits for the receiver; a round has two messages, and the
devices stand still for both. Through a socket one takes a tenth of the time, and the sender goes on at once.
Tensors of a device go through the process group in any case.

A thread that the system has to wake begins late, and with cold caches. So a rank with a device asks for some
time before it lets itself be woken, as CUDA does; its core has nothing else to do.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from specdist.utils.polling import is_readable

SOCKET_NAME = "link"
# Of the path of a Unix socket.
PATH_BYTES = 108
# Longer than a round takes.
ASKING_S = 0.2

# Returns when there is something to receive, or earlier.
Wait = Callable[[socket.socket], None]


def busy_wait(connection: socket.socket) -> None:
    """Ask again and again, for :data:`ASKING_S`; other threads run meanwhile."""
    end = time.monotonic() + ASKING_S
    while not is_readable(connection) and time.monotonic() < end:
        pass


def wait_of(device: torch.device) -> Wait | None:
    """How a rank with this device waits for messages; None sleeps: the cores of a CPU are those of all."""
    return busy_wait if device.type == "cuda" else None


class _Link(ABC):
    """One end; blocking. The first tensor of a CPU opens it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._is_open = False
        self._socket: socket.socket | None = None
        # The last tensor of the CPU, and its bytes: nearly all messages are in one frame.
        self._last: tuple[Tensor, memoryview] | None = None

    def __call__(self, tensor: Tensor) -> None:
        if self._last is None or tensor is not self._last[0]:
            is_on_cpu = tensor.device.type == "cpu"
            if is_on_cpu and not self._is_open:
                self._socket, self._is_open = self._open(), True
            if self._socket is None or not is_on_cpu:
                self._move_by_group(tensor)
                return
            self._last = tensor, memoryview(tensor.numpy().data).cast("B")
        assert self._socket is not None
        try:
            self._move(self._socket, self._last[1])
        except OSError as error:
            # As the process group's errors are.
            raise RuntimeError(f"the link to rank {self._rank} is broken: {error}") from error

    @abstractmethod
    def _move_by_group(self, tensor: Tensor) -> None: ...

    @abstractmethod
    def _move(self, connection: socket.socket, content: memoryview) -> None: ...

    @abstractmethod
    def _open(self) -> socket.socket | None: ...


class LinkTo(_Link):
    """Sends tensors to a rank, which receives them by a :class:`LinkFrom`."""

    def _move_by_group(self, tensor: Tensor) -> None:
        dist.send(tensor, self._rank)

    def _move(self, connection: socket.socket, content: memoryview) -> None:
        connection.sendall(content)

    def _open(self) -> socket.socket | None:
        """Listen where only this user can connect, and tell the receiver where. None if it cannot."""
        with (
            tempfile.TemporaryDirectory(prefix="specdist-") as folder,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            path = str(Path(folder, SOCKET_NAME))
            # A path that is too long is an OSError, too.
            with contextlib.suppress(OSError):
                listener.bind(path)
                listener.listen(1)
            told = torch.zeros(PATH_BYTES, dtype=torch.uint8)
            name = path.encode()[:PATH_BYTES]
            told.numpy()[: len(name)] = list(name)
            dist.send(told, self._rank)
            has_connected = torch.zeros(1, dtype=torch.uint8)
            dist.recv(has_connected, self._rank)
            return listener.accept()[0] if has_connected.item() else None


class LinkFrom(_Link):
    """Receives what a rank sends by a :class:`LinkTo`. ``wait`` comes before every receive."""

    def __init__(self, rank: int, wait: Wait | None = None) -> None:
        super().__init__(rank)
        self._wait = wait

    def _move_by_group(self, tensor: Tensor) -> None:
        dist.recv(tensor, self._rank)

    def _move(self, connection: socket.socket, content: memoryview) -> None:
        if self._wait is not None:
            self._wait(connection)
        while content:
            num_bytes = connection.recv_into(content, flags=socket.MSG_WAITALL)
            if not num_bytes:
                raise ConnectionResetError("it has closed the connection")
            content = content[num_bytes:]

    def _open(self) -> socket.socket | None:
        """Connect where the sender says. None if there is nothing: it is on another machine."""
        told = torch.zeros(PATH_BYTES, dtype=torch.uint8)
        dist.recv(told, self._rank)
        path = told.numpy().tobytes().rstrip(b"\0")
        connection: socket.socket | None = socket.socket(socket.AF_UNIX)
        assert connection is not None
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            connection = None
        dist.send(torch.tensor([connection is not None], dtype=torch.uint8), self._rank)
        return connection
