"""Inputs on an object store: fetched once into the spool of a machine, and then read as local files."""

from __future__ import annotations

import fcntl
import hashlib
import logging
from pathlib import Path

from specdist.data.store.access import explain
from specdist.data.store.object_store import ObjectInfo
from specdist.data.store.storage import StorePath, local_folder, spool_folder, storage_path
from specdist.utils.errors import UserError

# Besides data: the files of ``save_to_disk`` that tell which data belongs to a data set.
SUFFIXES = (".arrow", ".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")

logger = logging.getLogger(__name__)


def fetched(text: str, spool: str | None = None) -> Path:
    """The local file or folder with the content of ``--prompts``; a path is its own.

    The copy's folder is named after the URL and all sizes and versions (ETags), so a change on the store is
    another copy. Raises :class:`UserError` if the URL cannot be read.
    """
    path = storage_path(text, option="--prompts ", spool=spool)
    if not isinstance(path, StorePath):
        return path
    with explain(f"--prompts {text}", path):
        files, is_folder = _found(path)
        folder = spool_folder(spool) / "inputs" / f"{local_folder(text).name}-{_digest(files)}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for file, info in files.items():
                _fetch(file, folder / file.name, info)
    return folder if is_folder else folder / path.name


def _found(path: StorePath) -> tuple[dict[StorePath, ObjectInfo], bool]:
    """The objects to fetch, and whether the path is a folder."""
    try:
        return {path: path.stat()}, False
    except FileNotFoundError:
        listing = path.store.listing(path.key)
    found = {path / name: info for name, info in sorted(listing.items())
             if info is not None and name.endswith(SUFFIXES) and not name.startswith((".", "_"))}  # fmt: skip
    if not found:
        raise UserError(
            f"--prompts {path}: there is no such object, and no folder with files that end in one of "
            f"{', '.join(SUFFIXES)}"
        )
    return found, True


def _fetch(source: StorePath, file: Path, info: ObjectInfo) -> None:
    if file.exists() and file.stat().st_size == info.st_size:
        return
    logger.info("fetching %s (%.1f MB)", source, info.st_size / 1e6)
    temporary = file.with_name(f"{file.name}.tmp")
    source.store.download(source.key, temporary)
    temporary.replace(file)


def _digest(files: dict[StorePath, ObjectInfo]) -> str:
    told = [(str(file), info.st_size, info.version or info.st_mtime) for file, info in files.items()]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]
