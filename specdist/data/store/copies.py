"""Copies on this machine of what lies on an object store: inputs, fetched once into the cache directory; and
a run, for those who read it, of which only what is new or has changed is fetched again. Rows are then
memory-mapped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from specdist.data.file_names import LEASES_FOLDER, RECORD_FILE
from specdist.data.store.access import explain
from specdist.data.store.files import unique_tag, write_json
from specdist.data.store.object_store import ObjectInfo
from specdist.data.store.storage import StorePath, cache_folder, in_parallel, local_folder, storage_path
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

# Suffixes of input files: data, and the files of ``save_to_disk`` that tell which data belongs to a data set.
SUFFIXES = (".arrow", ".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz")
# Names and versions of the files of a run that are there; and those that are not needed to read it.
INDEX = "mirror.json"
LEFT_OUT = (f"{LEASES_FOLDER}/", "logs/")

logger = logging.getLogger(__name__)


def fetched(text: str, cache_dir: str | None = None) -> Path:
    """The local file or folder with the content of ``--prompts``, of a run all of it; a path is its own.

    The copy's folder is named after the URL and all sizes and versions (ETags), so a change on the store is
    another copy; without a version a file is fetched anew. Raises :class:`UserError` if the URL cannot be
    read.
    """
    path = storage_path(text, option="--prompts ", cache_dir=cache_dir)
    if not isinstance(path, StorePath):
        return path
    with explain(f"--prompts {text}", path):
        files, is_folder = _found(path)
        if is_folder and {"manifest.json", "config.yaml"} <= {*path.names()}:
            return mirrored(path)
        folder = cache_folder(cache_dir) / "inputs" / f"{local_folder(text).name}-{_digest(files)}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for file, info in files.items():
                copy = folder / file.name
                if not (info.version and copy.exists() and copy.stat().st_size == info.st_size):
                    logger.info("fetching %s (%.1f MB)", file, info.st_size / 1e6)
                    _fetch(file, copy)
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


def _fetch(source: StorePath, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{unique_tag()}.tmp")
    source.store.download(source.key, temporary)
    temporary.replace(file)


def _digest(files: dict[StorePath, ObjectInfo]) -> str:
    told = [(str(file), info.st_size, info.version or info.st_mtime) for file, info in files.items()]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


def mirrored(run: str | Path) -> Path:
    """The folder to read a run from: a path is its own. Raises :class:`UserError` if the store cannot be
    read, or has no run there."""
    path = storage_path(run) if isinstance(run, str) else run
    if not isinstance(path, StorePath):
        return path
    with explain(str(path), path):
        found = _consistent(path.store.below(path.key))
        if "manifest.json" not in found:
            raise UserError(f"{path} is not a run: there is no manifest.json. Give what --output was")
        folder = path.cache_dir / "mirror" / path.name
        folder.mkdir(parents=True, exist_ok=True)
        known = _known(folder / INDEX)
        versions = {name: info.version or f"{info.st_size} {info.st_mtime}" for name, info in found.items()}
        new = [name for name, version in versions.items()
               if known.get(name) != version or not (folder / name).is_file()]  # fmt: skip
        in_parallel(path, lambda name: _fetch(path / name, folder / name), new)
        for name in known.keys() - found.keys():
            (folder / name).unlink(missing_ok=True)
        write_json(folder / INDEX, versions)
    return folder


def _consistent(found: Mapping[str, ObjectInfo]) -> dict[str, ObjectInfo]:
    """Leave out the records of shards that were finished while the names were listed."""
    return {
        name: info for name, info in found.items()
        if not name.startswith(LEFT_OUT) and not name.endswith(".tmp")
        and not (RECORD_FILE.fullmatch(Path(name).name) and name.startswith("shards/")
                 and str(Path(name).with_suffix(".arrow")) not in found)
    }  # fmt: skip


def _known(index: Path) -> dict[str, object]:
    try:
        return dict(parse_object(index.read_bytes()))
    except (OSError, ValueError, json.JSONDecodeError):
        return {}
