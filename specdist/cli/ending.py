"""How commands log, and how they end. Imports no heavy library."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from specdist.utils.errors import RANK_0_FIRST_S, UserError
from specdist.utils.garbage import paused_garbage
from specdist.utils.packages import named_packages

USAGE_ERROR = 2
Main = Callable[[Sequence[str] | None], int]


def tells_mistakes(main: Main) -> Main:
    """Make a command print a :class:`UserError`, or which package it lacks, and return ``USAGE_ERROR``. Of
    several ranks, which all find the same error, only rank 0 prints it."""

    @functools.wraps(main)
    def telling(arguments: Sequence[str] | None = None) -> int:
        is_rank0 = os.environ.get("RANK", "0") == "0"
        try:
            with named_packages(f"specdist {main.__module__.rpartition('.')[2].replace('_', '-')}"):
                code = main(arguments)
        except UserError as error:
            code = USAGE_ERROR
            if is_rank0:
                print(f"error: {error}", file=sys.stderr, flush=True)
        if code == USAGE_ERROR and not is_rank0:
            time.sleep(RANK_0_FIRST_S)
        return code

    return telling


def log_to_stderr() -> None:
    """Log specdist's own messages, with the time."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("specdist").setLevel(logging.INFO)


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """For imports that take seconds: says so, on rank 0, and leaves the garbage collector out."""
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        log_to_stderr()
        logging.getLogger(__name__).info("importing torch and transformers")
    with paused_garbage():
        yield


def end_at_once(code: int) -> NoReturn:
    """End this process after flushing its output. Threads of communication libraries sometimes abort during
    the interpreter's exit, which a launcher would report as the failure of a successful run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
