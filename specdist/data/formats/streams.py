"""Input files as streams of bytes, decompressed."""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from specdist.utils.errors import UserError

READ_BYTES = 2**20


def open_input(path: Path) -> BinaryIO:
    """A file's content; that of a ``.gz`` is decompressed."""
    file = path.open("rb")
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file


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
