"""Files that are either whole or absent, whatever moment the machine goes down."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY_SUFFIX = ".tmp"
READ_BYTES = 2**20


def temporary_path(path: Path) -> Path:
    """Where ``path`` is written before it gets its name: the same folder, so that the rename is atomic."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: without it a power loss may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write ``path`` so that a reader sees the old file or the whole new one, never a part of it.

    ``write`` gets the open file. Whatever it raises is passed on and leaves ``path`` as it was.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically; equal values in equal order give equal bytes."""
    content = (json.dumps(value, indent=2) + "\n").encode()
    write_atomically(path, lambda file: file.write(content))


def sha256_of(path: Path) -> bytes:
    """The digest of a file's content, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.digest()
