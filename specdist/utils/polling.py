"""Whether a file descriptor has something to read. ``select`` fails for descriptors above 1,023."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

MS_PER_S = 1000


def is_readable(source: FileDescriptorLike, timeout_s: float | None = 0.0) -> bool:
    """Whether something can be read, or the other end is closed.

    ``timeout_s``: how long to wait; None waits for ever.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * MS_PER_S))
