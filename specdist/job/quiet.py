"""Libraries print and draw bars while they load; stdout is for the job's result."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers.utils import logging as transformers_logging

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def quiet_libraries(on_item: Callable[[], None]) -> Iterator[None]:
    """Keep what they print for the debug log. ``on_item`` is called for every item of a loop that
    transformers would draw a bar for, such as the tensors of a model."""

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
