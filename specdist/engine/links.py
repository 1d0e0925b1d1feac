"""One direction of a link between two ranks: a Unix socket on one machine, else the process group.

Gloo hands every message to threads of its own and waits for the receiver; a round has two messages, and the
devices stand still for both. Through a socket one takes a tenth of the time, and the sender goes on at once.
Tensors of a device go through the process group in any case.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

SOCKET_NAME = "link"
# Of the path of a Unix socket.
PATH_BYTES = 108


class LinkTo:
    """Sends tensors to a rank, which receives them by a :class:`LinkFrom`; blocking."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._is_open = False
        self._socket: socket.socket | None = None

    def __call__(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            dist.send(tensor, self._rank)
            return
        if not self._is_open:
            self._socket, self._is_open = self._offer(), True
        if self._socket is None:
            dist.send(tensor, self._rank)
            return
        with _as_runtime_error(self._rank):
            self._socket.sendall(_bytes(tensor))

    def _offer(self) -> socket.socket | None:
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


class LinkFrom:
    """Receives what a rank sends by a :class:`LinkTo`; blocking."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._is_open = False
        self._socket: socket.socket | None = None

    def __call__(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            dist.recv(tensor, self._rank)
            return
        if not self._is_open:
            self._socket, self._is_open = self._take_up(), True
        if self._socket is None:
            dist.recv(tensor, self._rank)
            return
        missing = _bytes(tensor)
        with _as_runtime_error(self._rank):
            while missing:
                num_bytes = self._socket.recv_into(missing, flags=socket.MSG_WAITALL)
                if not num_bytes:
                    raise ConnectionResetError("it has closed the connection")
                missing = missing[num_bytes:]

    def _take_up(self) -> socket.socket | None:
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


@contextlib.contextmanager
def _as_runtime_error(rank: int) -> Iterator[None]:
    """As the process group's errors are."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"the link to rank {rank} is broken: {error}") from error


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy().data).cast("B")
