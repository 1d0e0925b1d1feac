"""One direction of messages between ranks: arrays of integers in one frame, then tensors as they are.

A frame has a fixed size, which the receiver knows; the rest of a longer message follows in a second transfer,
whose size the frame contains. A round's message fits into one frame unless prompts are long.

Between two ranks of one machine a frame goes through a Unix socket, else through the process group. Gloo
hands every message to threads of its own and waits for the receiver; a round has two messages, and the
devices stand still for both. Through a socket one takes a tenth of the time, and the sender goes on at once.
Tensors of a device go through the process group in any case.

A thread that the system has to wake begins late, and with cold caches. So a rank with a device busy-waits for
some time before it lets itself be woken, as CUDA does; its core has nothing else to do.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specdist.utils.polling import is_readable

# Words of eight bytes.
FRAME_WORDS = 2048
# Longer than a round takes.
ASKING_S = 0.2
CPU = torch.device("cpu")

# Returns when there is something to receive, or earlier.
Wait = Callable[[socket.socket], None]


class Link:
    """One end."""

    def __init__(self, move: Callable[[Tensor], object]) -> None:
        """``move`` sends or receives a whole tensor, blocking."""
        self._move = move
        self._frame = torch.zeros(FRAME_WORDS, dtype=torch.int64)
        self._frame_words = self._frame.numpy()

    def transfer(self, tensor: Tensor) -> None:
        """Send a tensor, or receive into it; both ends know its shape."""
        self._move(tensor)

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Send arrays of integers: their number, their lengths, then their contents."""
        lengths = list(map(len, arrays))
        size = 1 + len(arrays) + sum(lengths)
        parts = [np.array([len(arrays), *lengths], np.int64), *arrays]
        if size <= FRAME_WORDS:
            np.concatenate(parts, out=self._frame_words[:size])
            self.transfer(self._frame)
            return
        message = np.concatenate(parts, dtype=np.int64)
        self._frame_words[:] = message[:FRAME_WORDS]
        self.transfer(self._frame)
        self.transfer(torch.from_numpy(message[FRAME_WORDS:]))

    def receive(self) -> list[np.ndarray]:
        """Wait for a message and return its arrays, of words of 64 bits."""
        self.transfer(self._frame)
        num_arrays = int(self._frame_words[0])
        lengths = self._frame_words[1 : 1 + num_arrays].tolist()
        bounds = list(accumulate(lengths, initial=1 + num_arrays))
        size = bounds[-1]
        message = self._frame_words[:size].copy()
        if size > FRAME_WORDS:
            rest = torch.zeros(size - FRAME_WORDS, dtype=torch.int64)
            self.transfer(rest)
            message = np.concatenate([message, rest.numpy()])
        return [message[begin:end] for begin, end in pairwise(bounds)]


def link_to(rank: int) -> Link:
    """Messages to one rank of the world."""
    return Link(_Mover(rank, _listen, socket.socket.sendall, dist.send))


def link_from(rank: int, wait: Wait | None = None) -> Link:
    """Messages from one rank of the world. ``wait`` comes before every receive."""

    def receive(connection: socket.socket, content: memoryview) -> None:
        if wait is not None:
            wait(connection)
        while content:
            num_bytes = connection.recv_into(content, flags=socket.MSG_WAITALL)
            if not num_bytes:
                raise ConnectionResetError("it has closed the connection")
            content = content[num_bytes:]

    return Link(_Mover(rank, _connect, receive, dist.recv))


def broadcast_link(source: int, group: dist.ProcessGroup) -> Link:
    """Messages from the source to every other rank of the group; each end uses its own half."""
    return Link(lambda tensor: dist.broadcast(tensor, source, group=group))


def busy_wait(connection: socket.socket) -> None:
    """Ask again and again, for :data:`ASKING_S`; other threads run meanwhile."""
    end = time.monotonic() + ASKING_S
    while not is_readable(connection) and time.monotonic() < end:
        pass


def wait_of(device: torch.device) -> Wait | None:
    """How a rank with this device waits for messages; None sleeps: the cores of a CPU are those of all."""
    return busy_wait if device.type == "cuda" else None


class _Mover:
    """Sends tensors to a rank, or receives them from it. The first one of a CPU opens the socket."""

    def __init__(
        self,
        rank: int,
        open_socket: Callable[[int], socket.socket | None],
        by_socket: Callable[[socket.socket, memoryview], None],
        by_group: Callable[[Tensor, int], object],
    ) -> None:
        self._rank = rank
        self._open, self._by_socket, self._by_group = open_socket, by_socket, by_group
        self._is_open = False
        self._socket: socket.socket | None = None

    def __call__(self, tensor: Tensor) -> None:
        is_on_cpu = tensor.device.type == "cpu"
        if is_on_cpu and not self._is_open:
            self._socket, self._is_open = self._open(self._rank), True
        if self._socket is None or not is_on_cpu:
            self._by_group(tensor, self._rank)
            return
        try:
            self._by_socket(self._socket, memoryview(tensor.numpy().data).cast("B"))
        except OSError as error:
            # As the process group's errors are.
            raise RuntimeError(f"the link to rank {self._rank} is broken: {error}") from error


def _listen(rank: int) -> socket.socket | None:
    """Listen where only this user can connect, and tell the receiver where. None if it cannot."""
    with (
        tempfile.TemporaryDirectory(prefix="specdist-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = str(Path(folder, "link"))
        # A path that is too long is an OSError, too.
        with contextlib.suppress(OSError):
            listener.bind(path)
            listener.listen(1)
        dist.send_object_list([path], rank, device=CPU)
        answer = [False]
        dist.recv_object_list(answer, rank, device=CPU)
        return listener.accept()[0] if answer[0] else None


def _connect(rank: int) -> socket.socket | None:
    """Connect where the sender says. None if there is nothing: it is on another machine."""
    told = [""]
    dist.recv_object_list(told, rank, device=CPU)
    connection: socket.socket | None = socket.socket(socket.AF_UNIX)
    assert connection is not None
    try:
        connection.connect(told[0])
    except OSError:
        connection.close()
        connection = None
    dist.send_object_list([connection is not None], rank, device=CPU)
    return connection
