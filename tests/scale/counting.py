"""Counts the operations on files below a folder, as a file server would see them."""

from __future__ import annotations

import contextlib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

# A listing is answered in pieces of about so many names.
NAMES_PER_OPERATION = 1000
METADATA, READS = "metadata", "reads"
# By their names in ``os``; each is one operation on metadata.
FUNCTIONS = ("stat", "link", "unlink", "rename", "replace", "mkdir", "rmdir", "utime", "open")


class CountingFiles:
    """While :meth:`patched`, counts into ``counts``, which may be replaced at any time.

    Opening a file is an operation on metadata, and if it is opened to be read, one read besides: all files
    that replicas read to coordinate are small. A listing is one for every thousand names that it tells.
    Writing is not counted.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in FUNCTIONS:
                stack.enter_context(mock.patch.object(os, name, self._counted(getattr(os, name))))
            stack.enter_context(mock.patch.object(os, "listdir", self._listing(os.listdir)))
            stack.enter_context(mock.patch.object(os, "scandir", self._scanning(os.scandir)))
            stack.enter_context(mock.patch.object(io, "open", self._opening(io.open)))
            yield

    def _is_below(self, path: Any) -> bool:
        return not isinstance(path, int) and os.fspath(path).startswith(self._folder)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if self._is_below(path):
                self.counts[METADATA] += 1
            return function(path, *args, **options)

        return call

    def _listing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".") -> Any:
            names = function(path)
            if self._is_below(path):
                self.counts[METADATA] += 1 + len(names) // NAMES_PER_OPERATION
            return names

        return call

    def _scanning(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def call(path: Any = ".") -> Iterator[Any]:
            with function(path) as entries:
                found = list(entries)
            if self._is_below(path):
                self.counts[METADATA] += 1 + len(found) // NAMES_PER_OPERATION
            yield iter(found)

        return call

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if self._is_below(path):
                self.counts[METADATA] += 1
                if "r" in mode:
                    self.counts[READS] += 1
            return function(path, mode, *args, **options)

        return call
