"""Messages between a target group and a draft that are not ranks of one process group: over a socket.

If either side ends, the socket breaks and nothing else does. A message is a kind, arrays of words of eight
bytes, and at most one matrix of float32, all from host memory.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np

# Magic, kind, words, rows and columns of the matrix.
HEADER = struct.Struct("<IIQQQ")
MAGIC = 0x73706473
# A header with larger numbers is not one of ours.
MAX_WORDS, MAX_FLOATS = 1 << 30, 1 << 36
WORD_BYTES = 8
CHUNK_BYTES = 1 << 20


class Kind(IntEnum):
    """What a message is."""

    GREETING = 0
    WELCOME = 1
    REFUSAL = 2
    REQUEST = 3
    NEWS = 4
    REPLY = 5
    OUT_OF_MEMORY = 6


class LinkError(RuntimeError):
    """The other side is gone, does not answer in time, or sends something else than a message."""


@dataclass(frozen=True)
class Message:
    """``matrix``: float32 [W, V], or None."""

    kind: Kind
    arrays: Sequence[np.ndarray] = ()
    matrix: np.ndarray | None = None

    @staticmethod
    def of_text(kind: Kind, text: str) -> Message:
        return Message(kind, [np.frombuffer(text.encode(), np.uint8).astype(np.int64)])

    @staticmethod
    def of_values(kind: Kind, values: Mapping[str, Any]) -> Message:
        """``values`` as JSON."""
        return Message.of_text(kind, json.dumps(values))

    @property
    def text(self) -> str:
        return self.arrays[0].astype(np.uint8).tobytes().decode() if self.arrays else ""

    @property
    def values(self) -> dict[str, Any]:
        """Raises LinkError if there are none."""
        try:
            found = json.loads(self.text)
        except ValueError as error:
            raise LinkError(f"its greeting is not valid JSON ({error})") from error
        if not isinstance(found, dict):
            raise LinkError("its greeting is not a JSON object")
        return found

    def encoded(self) -> list[bytes]:
        """The message's bytes, in parts."""
        words = np.concatenate([np.array([len(self.arrays), *map(len, self.arrays)], np.int64), *self.arrays])
        rows, columns = (0, 0) if self.matrix is None else self.matrix.shape
        found = [HEADER.pack(MAGIC, self.kind, len(words), rows, columns), words.tobytes()]
        if self.matrix is not None:
            found.append(np.ascontiguousarray(self.matrix, np.float32).tobytes())
        return found


class Inbox:
    """Puts the bytes of a stream together to messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, content: bytes) -> None:
        self._buffer += content

    def take(self) -> Message | None:
        """The next message, if all of it is there. Raises LinkError for anything else."""
        if len(self._buffer) < HEADER.size:
            return None
        magic, kind, num_words, rows, columns = HEADER.unpack_from(self._buffer)
        is_known = magic == MAGIC and kind in tuple(Kind)
        if not is_known or not 1 <= num_words <= MAX_WORDS or rows * columns > MAX_FLOATS:
            raise LinkError("it sends something else than messages of specdist")
        begin_matrix = HEADER.size + WORD_BYTES * num_words
        end = begin_matrix + 4 * rows * columns
        if len(self._buffer) < end:
            return None
        words = np.frombuffer(bytearray(self._buffer[HEADER.size : begin_matrix]), np.int64)
        matrix = None
        if rows:
            matrix = np.frombuffer(bytearray(self._buffer[begin_matrix:end]), np.float32)
            matrix = matrix.reshape(rows, columns)
        del self._buffer[:end]
        num_arrays = int(words[0])
        bounds = 1 + num_arrays + np.cumsum([0, *words[1 : 1 + num_arrays].tolist()])
        if bounds[-1] != num_words:
            raise LinkError("it sends a message whose parts do not fit together")
        return Message(Kind(kind), [words[begin:end] for begin, end in pairwise(bounds.tolist())], matrix)


class Link:
    """The target group's end: blocking, with a limit of time after which it counts as broken.

    ``num_messages`` and ``num_bytes`` count both directions.
    """

    def __init__(self, connection: socket.socket, *, timeout_s: float) -> None:
        self._socket = connection
        self._timeout_s = timeout_s
        self._inbox = Inbox()
        self.num_messages = 0
        self.num_bytes = 0
        # Number of the draft at the other end, where there are several.
        self.draft = 0

    def send(self, message: Message) -> None:
        """Raises LinkError."""
        deadline = time.monotonic() + self._timeout_s
        for part in message.encoded():
            self._limited(deadline)
            try:
                self._socket.sendall(part)
            except OSError as error:
                raise self._broken(error) from error
            self.num_bytes += len(part)
        self.num_messages += 1

    def receive(self) -> Message:
        """Wait for a message. Raises LinkError."""
        deadline = time.monotonic() + self._timeout_s
        while (message := self._inbox.take()) is None:
            self._limited(deadline)
            try:
                content = self._socket.recv(CHUNK_BYTES)
            except OSError as error:
                raise self._broken(error) from error
            if not content:
                raise LinkError("it has closed the connection")
            self._inbox.add(content)
            self.num_bytes += len(content)
        self.num_messages += 1
        return message

    def close(self) -> None:
        self._socket.close()

    def _limited(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise LinkError(f"it has not answered within {self._timeout_s:.0f} s")
        self._socket.settimeout(left)

    def _broken(self, error: OSError) -> LinkError:
        if isinstance(error, TimeoutError):
            return LinkError(f"it has not answered within {self._timeout_s:.0f} s")
        return LinkError(f"the connection is broken: {error}")
