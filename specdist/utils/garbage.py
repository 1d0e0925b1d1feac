"""The garbage collector in loops that must not pause."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_garbage() -> Iterator[None]:
    """Inside, the garbage collector leaves alone what is alive now: with the libraries' millions of objects a
    full collection takes longer than a round."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
