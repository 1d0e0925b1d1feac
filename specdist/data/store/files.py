"""Files that are either complete or absent, whenever the machine goes down; on a store, objects."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from specdist.data.store.storage import StorePath, local_copy, write_through
from specdist.utils.errors import DISK_FULL, UserError

TEMPORARY_SUFFIX = ".tmp"
READ_BYTES = 2**20
SEAL = "crc32"
# What file systems without hard links answer to one.
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` (disk full, read-only or gone) into a :class:`UserError` that names ``path``."""
    try:
        yield
    except OSError as error:
        found = UserError(
            f"{path} cannot be written ({error.strerror or error}): free some space or make it writable, and "
            "start the same command again; all finished rows are kept"
        )
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            found.exit_code = DISK_FULL
        raise found from error


def unique_tag() -> str:
    """A name that no other writer has, on any node."""
    return secrets.token_hex(6)


def temporary_path(path: Path, tag: str) -> Path:
    """Where to write ``path`` before it gets its name: in the same folder, so that renaming is atomic."""
    return path.with_name(f"{path.name}.{tag}{TEMPORARY_SUFFIX}")


def names_in(folder: Path, *prefixes: str) -> list[str]:
    """Names of the files in a folder that begin with one of the prefixes, if any: by one listing, on a store
    by one of each prefix. Raises OSError."""
    if isinstance(folder, StorePath):
        return [name for prefix in prefixes or ("",) for name in folder.names(prefix)]
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.name.startswith(prefixes or "")]


def names_within(folder: Path, *prefixes: str) -> list[str]:
    """The same; none without the folder."""
    try:
        return names_in(folder, *prefixes)
    except FileNotFoundError:
        return []


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: without it a power loss may undo a rename. A store's are."""
    if isinstance(folder, StorePath):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file that has no readers yet. If ``write`` raises, no file is left."""
    if isinstance(path, StorePath):
        write_through(path, write)
        return
    try:
        with path.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write ``path`` so that a reader sees the old file, also if ``write`` raises, or the whole new one.

    ``write`` is called again if the file is gone before it has its name: a replica that is paused for long
    passes for dead, and others tidy up after it.
    """
    if isinstance(path, StorePath):
        write_through(path, write)
        return
    is_named = False
    while not is_named:
        temporary = temporary_path(path, unique_tag())
        write_durably(temporary, write)
        try:
            temporary.replace(path)
            is_named = True
        except FileNotFoundError:
            continue
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    fsync_folder(path.parent)


def publish(temporary: Path, path: Path) -> bool:
    """Give a finished file its name, unless the name is taken: of all callers, on any node, one gets True.

    ``temporary`` stays where it is; it is local where ``path`` is on a store. Raises FileNotFoundError if it
    is gone.
    """
    if isinstance(path, StorePath):
        return path.upload(temporary, exclusively=True)
    try:
        os.link(temporary, path)
    except FileExistsError:
        # If the file server's answer is lost, the second attempt finds the link of the first.
        if not path.exists() or not temporary.samefile(path):
            return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return _publish_without_links(temporary, path)
    fsync_folder(path.parent)
    return True


def _publish_without_links(temporary: Path, path: Path) -> bool:
    """The name is taken with an empty file, which a reader may see for a moment."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    copy = temporary_path(path, unique_tag())
    try:
        copy.write_bytes(temporary.read_bytes())
        copy.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            copy.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)
    return True


def move(temporary: Path, path: Path) -> None:
    """Give a finished file its name, in the place of what has it. Raises FileNotFoundError if it is gone."""
    if isinstance(path, StorePath) and not isinstance(temporary, StorePath):
        path.upload(temporary)
        temporary.unlink(missing_ok=True)
    else:
        temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as :func:`json_bytes`, atomically."""
    content = json_bytes(value)
    write_atomically(path, lambda file: file.write(content))


def json_bytes(value: Any) -> bytes:
    """Indented JSON: the same values in the same order give the same bytes."""
    return (json.dumps(value, indent=2) + "\n").encode()


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """The values and their checksum, for :func:`unsealed` to compare."""
    return {**values, SEAL: _seal_of(values)}


def unsealed(values: dict[str, Any]) -> dict[str, Any]:
    """The values without their checksum. Raises ValueError if they do not match it."""
    rest = {name: value for name, value in values.items() if name != SEAL}
    if values.get(SEAL) != _seal_of(rest):
        raise ValueError("its checksum does not match its content")
    return rest


def _seal_of(values: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(values).encode()):08x}"


def sha256_of(path: Path) -> bytes:
    """The digest of a file's content."""
    digest = hashlib.sha256()
    with local_copy(path) as copy, copy.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.digest()


class WatchedFiles:
    """Input files, which must not change while rows are read from them. To be made before they are opened.

    A check compares a file's size, inode and modification time, and reads it only if these differ.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._stamps = [_stamp(file) for file in files]
        self._digests: list[bytes] | None = None

    def fingerprint(self) -> str:
        """SHA-256 of the files' SHA-256s in order, each read once. Raises :class:`UserError` if one has
        changed."""
        if self._digests is None:
            self._digests = [_digest(file) for file in self._files]
            if [_stamp(file) for file in self._files] != self._stamps:
                raise _changed(self._files[0])
        return hashlib.sha256(b"".join(self._digests)).hexdigest()

    def check(self, index: int) -> None:
        """Raises :class:`UserError` if this file is gone or its content changed."""
        file, stamp = self._files[index], _stamp(self._files[index])
        if stamp == self._stamps[index]:
            return
        if self._digests is None or _digest(file) != self._digests[index]:
            raise _changed(file)
        self._stamps[index] = stamp


def _stamp(file: Path) -> tuple[int, int, int]:
    """A file's size, inode and modification time. Raises :class:`UserError` if the file is gone."""
    try:
        found = file.stat()
    except OSError as error:
        raise _changed(file) from error
    return found.st_size, found.st_ino, found.st_mtime_ns


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
