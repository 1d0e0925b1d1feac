"""How commands log, and how they end. Imports nothing that is heavy."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from specdist.utils.errors import UserError

USAGE_ERROR = 2
# A launcher ends all ranks when one has ended: rank 0 gets the time to tell what is wrong.
RANK_0_FIRST_S = 5.0
Main = Callable[[Sequence[str] | None], int]


def tells_mistakes(main: Main) -> Main:
    """A command that ends with ``USAGE_ERROR`` for a :class:`UserError`, and a message.

    Where several ranks run a command, all of them find the same mistake: rank 0 tells it.
    """

    @functools.wraps(main)
    def telling(arguments: Sequence[str] | None = None) -> int:
        is_rank0 = os.environ.get("RANK", "0") == "0"
        try:
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
    """specdist's own lines, with the time."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("specdist").setLevel(logging.INFO)


def end_at_once(code: int) -> NoReturn:
    """End this process when all is written. Communication libraries' threads sometimes abort while the
    interpreter ends, which a launcher would report as the failure of a run that has succeeded."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
