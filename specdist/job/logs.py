"""The log that every rank keeps in the run folder; the run does not depend on it."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

logger = logging.getLogger(__name__)


class RunLog(logging.FileHandler):
    """A disk that takes no more lines is told once, where logging would show a traceback for every line."""

    _is_failing = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_failing:
            self._is_failing = True
            with contextlib.suppress(OSError):
                sys.stderr.write(
                    f"{self.baseFilename} cannot be written ({error}): the run continues without it\n"
                )

    def close(self) -> None:
        # The lines that found no room are tried once more, and still find none.
        with contextlib.suppress(OSError):
            super().close()


def add_run_log(path: Path, prefix: str) -> bool:
    """Log into this file, too; False if it cannot be written. ``prefix``: which rank says it."""
    try:
        handler = RunLog(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s): the run continues without it", path, error)
        return False
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{prefix}] %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    return True
