"""What is written besides the job's result: on stderr, in each rank's log, and by libraries."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from specdist.utils.documents import is_brief

# Whose lines a terminal shows, beside warnings.
SUMMARY = tuple(f"specdist.{name}" for name in ("job.generate", "job.ranks.entry", "job.totals", "training"))

logger = logging.getLogger(__name__)


class ConsoleLog(logging.StreamHandler[TextIO]):
    """Stderr, above a bar if there is one: a summary, or all."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not is_brief() or record.levelno > logging.INFO or record.name.startswith(SUMMARY)

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class RunLog(logging.FileHandler):
    """A log file; if it cannot be written, that is reported once, without a traceback for every line."""

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
        # Flushes lines that could not be written.
        with contextlib.suppress(OSError):
            super().close()


def add_run_log(path: Path, prefix: str) -> bool:
    """Log into this file, too; False if it cannot be written. ``prefix``: the rank's role."""
    try:
        handler = RunLog(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s): the run continues without it", path, error)
        return False
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{prefix}] %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    for early in [each for each in root.handlers if isinstance(each, MemoryHandler)]:
        early.setTarget(handler)
        root.removeHandler(early)
        early.close()
    return True


@contextlib.contextmanager
def quiet_libraries(on_item: Callable[[], None]) -> Iterator[None]:
    """Keep what libraries print out of stdout, which is for the job's result; the debug log has it.

    ``on_item`` is called for every item of a loop that transformers would draw a bar for, such as a model's
    tensors.
    """

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            on_item()
            yield item

    def without_bar(factory: Callable[..., Any], arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        return factory(*map(counted, arguments[:1]), *arguments[1:], **settings)

    transformers_logging.disable_progress_bar()
    hook = transformers_logging.set_tqdm_hook(without_bar)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            yield
    finally:
        transformers_logging.set_tqdm_hook(hook)
    logger.debug("printed while loading: %s", printed.getvalue())
