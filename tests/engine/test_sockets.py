"""Messages between a target group and its draft: whole ones, in any pieces, and nothing else."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from specdist.engine.sockets import HEADER, MAGIC, Inbox, Kind, Link, LinkError, Message


def test_a_message_arrives_unchanged_in_any_pieces() -> None:
    arrays = [np.array([-1, 2**62]), np.zeros(0, np.int64), np.array([0.25]).view(np.int64)]
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    messages = [Message(Kind.REQUEST, arrays, matrix), Message.of_values(Kind.GREETING, {"group": 1})]
    content = b"".join(part for message in messages for part in message.encoded())
    inbox, found = Inbox(), []
    for byte in content:
        inbox.add(bytes([byte]))
        if (message := inbox.take()) is not None:
            found.append(message)
    assert [message.kind for message in found] == [Kind.REQUEST, Kind.GREETING]
    assert [array.tolist() for array in found[0].arrays] == [array.tolist() for array in arrays]
    assert found[0].matrix is not None and np.array_equal(found[0].matrix, matrix)
    assert found[1].values == {"group": 1}


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
        HEADER.pack(MAGIC, 99, 1, 0, 0),
        HEADER.pack(MAGIC, Kind.REQUEST, 1 << 40, 0, 0),
        HEADER.pack(MAGIC, Kind.REQUEST, 2, 0, 0) + np.array([1, 5]).tobytes(),
    ],
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    inbox = Inbox()
    inbox.add(content)
    with pytest.raises(LinkError):
        inbox.take()


def test_a_side_that_does_not_answer_is_given_up() -> None:
    near, far = socket.socketpair()
    with near, far:
        link = Link(near, timeout_s=0.05)
        # Bytes that come, but never make a message, do not put it off.
        far.sendall(HEADER.pack(MAGIC, Kind.REPLY, 2, 0, 0))
        begin = time.monotonic()
        with pytest.raises(LinkError, match="not answered"):
            link.receive()
        assert time.monotonic() - begin < 30
        far.close()
        with pytest.raises(LinkError, match="closed"):
            Link(near, timeout_s=5).receive()
