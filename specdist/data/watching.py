"""Input files that must stay as they are while rows are read from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from specdist.data.files import sha256_of
from specdist.utils.errors import UserError


class WatchedFiles:
    """Files as they were when this was made, which is to be before they are opened.

    Each check looks at a file's size and time of change, and reads it only where these are others.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._stamps = [_stamp(file) for file in files]
        self._digests: list[bytes] | None = None

    def fingerprint(self) -> str:
        """SHA-256 of the files' SHA-256s in order. Raises :class:`UserError` if one has changed."""
        self._digests = [_digest(file) for file in self._files]
        if [_stamp(file) for file in self._files] != self._stamps:
            raise _changed(self._files[0])
        return hashlib.sha256(b"".join(self._digests)).hexdigest()

    def check(self, index: int) -> None:
        """Raises :class:`UserError` if this file is gone, or has other content."""
        file, stamp = self._files[index], _stamp(self._files[index])
        if stamp == self._stamps[index]:
            return
        if self._digests is None or _digest(file) != self._digests[index]:
            raise _changed(file)
        self._stamps[index] = stamp


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise _changed(file) from error
    return found.st_size, found.st_mtime_ns


def _digest(file: Path) -> bytes:
    try:
        return sha256_of(file)
    except OSError as error:
        raise _changed(file) from error


def _changed(file: Path) -> UserError:
    return UserError(
        f"--prompts: {file} was deleted or changed after the job had opened it: restore it, and start the "
        "same command again; all finished rows are kept"
    )
