"""The garbage collector where it costs more than it finds."""

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


@contextlib.contextmanager
def paused_garbage() -> Iterator[None]:
    """For imports. Inside, the garbage collector does not run: it takes a seventh of the time, and finds
    nothing. It leaves alone what is there at the end: its first collection would take half a second."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
