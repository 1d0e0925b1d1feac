"""Input files as streams of bytes: decompressed, and digested while they are read."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from specdist.utils.errors import UserError

READ_BYTES = 2**20


def open_input(path: Path, digest: Any = None) -> BinaryIO:
    """A file's content; that of a ``.gz`` is decompressed. ``digest``: a hash object that gets the bytes of
    the file itself."""
    file: Any = path.open("rb")
    if digest is not None:
        file = io.BufferedReader(_Digesting(file, digest), READ_BYTES)
    return cast(BinaryIO, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises :class:`UserError` for errors of the disk, of permissions and of compression; others as they
    are."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"--prompts {path} cannot be decompressed ({error}): compress or copy it again, or give the "
            "decompressed file"
        ) from error
    except OSError as error:
        # pyarrow's errors of the content are OSError, too, but without a number.
        if error.errno is None:
            raise
        raise UserError(
            f"--prompts {path} cannot be read ({os.strerror(error.errno)}): check its permissions and disk"
        ) from error


class _Digesting(io.RawIOBase):
    """A file whose bytes go into a hash object as they are read."""

    def __init__(self, file: BinaryIO, digest: Any) -> None:
        self._file, self._digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        self._digest.update(content)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()
