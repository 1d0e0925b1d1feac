"""Opens the folder of a run, new or resumed, and completes what a crash has left undone."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from specdist.data.file_names import LEASES_FOLDER, PROBE, RUN_TAG, SHARD_FOLDERS
from specdist.data.leases.leases import lease_files
from specdist.data.leases.membership import is_membership_file
from specdist.data.run.manifest import Manifest, check_same
from specdist.data.run.run_folder import CARD_MARK, RunFolder
from specdist.data.store.files import TEMPORARY_SUFFIX, fsync_folder, write_atomically
from specdist.data.store.storage import StorePath
from specdist.utils.errors import UserError

logger = logging.getLogger(__name__)


def open_run_folder(
    path: Path,
    manifest: Manifest,
    config_yaml: str,
    overwrite: bool,
    find_another: Callable[[], str | None] | None = None,
    *,
    is_tidied: bool = False,
) -> RunFolder:
    """Create the folder, or resume its run if that has the same manifest.

    With ``overwrite`` the run's files are deleted first, and no others (``logs/`` stays). A resumed run
    keeps its manifest and the ``info`` in it, and gets the new ``config.yaml``. Raises :class:`UserError`
    if the folder holds another run or other files, if it cannot be written, or if the run is to be
    replaced while ``find_another`` finds a replica at work on it. Opening completes what a crash has left
    undone, for which the files of all shards are listed, unless a replica at work has done so lately:
    ``is_tidied``.

    Replicas must not open a folder at the same time: see
    :meth:`specdist.data.leases.membership.Membership.setup`.
    """
    folder = RunFolder(path)
    try:
        _take(folder, manifest, overwrite, find_another)
        write_atomically(folder.config_path, lambda file: file.write(config_yaml.encode()))
        if not is_tidied:
            _tidy(folder)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error}") from error
    return folder


def _take(
    folder: RunFolder,
    manifest: Manifest,
    overwrite: bool,
    find_another: Callable[[], str | None] | None,
) -> None:
    """Give the folder to a run with this manifest, or refuse."""
    folder.path.mkdir(parents=True, exist_ok=True)
    has_run = folder.manifest_path.exists()
    if has_run:
        old = folder.manifest
        # A run that failed before its first row, perhaps for the size of its cache, may be replaced.
        has_no_rows = not _files_of(folder)
        is_other = old.fingerprint != manifest.fingerprint
        is_replaced = overwrite or (has_no_rows and is_other)
        other = find_another() if is_replaced and find_another is not None else None
        if overwrite and other is not None:
            raise UserError(
                f"--overwrite would delete the results that {other} is writing into --output "
                f"{folder.path}: wait for it to end, or stop it; without --overwrite this replica joins "
                "that run"
            )
        if not overwrite and (other is not None or not has_no_rows):
            check_same(old, manifest)
        elif has_no_rows and is_other:
            manifest.write(folder.manifest_path)
    else:
        _check_empty(folder)
        # Written first: a folder with other files and without a manifest would be refused.
        manifest.write(folder.manifest_path)
    for name in (*SHARD_FOLDERS, "logs"):
        (folder.path / name).mkdir(exist_ok=True)
    if has_run and overwrite:
        delete_run_files(folder)
        manifest.write(folder.manifest_path)
    folder.run_tag = folder.manifest.info.get(RUN_TAG, "")
    fsync_folder(folder.path)


def _check_empty(folder: RunFolder) -> None:
    """Allow logs, which a launcher may write, a crash's temporary manifest, and probes of a store."""
    others = sorted(entry.name for entry in folder.path.iterdir() if not _is_harmless(folder, entry))
    if others:
        shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise UserError(
            f"--output {folder.path} is not empty and is not a run folder (no manifest.json; it contains "
            f"{shown}): give a new folder. --overwrite deletes only files that a run has written"
        )


def _is_harmless(folder: RunFolder, entry: Path) -> bool:
    if entry.name == LEASES_FOLDER and entry.is_dir():
        return all(is_membership_file(file.name) for file in entry.iterdir())
    is_torn = entry.suffix == TEMPORARY_SUFFIX and entry.name.startswith(folder.manifest_path.name)
    return entry.name == folder.logs_path.name or is_torn or entry.name.startswith(f"{PROBE}.")


def _files_of(folder: RunFolder) -> list[tuple[Path, int]]:
    """All files of the shards, temporary ones too, with the shard's number; records come first."""
    found = [(path, int(match[1])) for kind in SHARD_FOLDERS for path, match in folder.files(kind)]
    return sorted(found, key=lambda file: file[0] != folder.record_path(file[1]))


def delete_run_files(folder: RunFolder) -> None:
    """Delete results, durably before the new manifest atomically replaces the old one."""
    for path, _ in [*_files_of(folder), *lease_files(folder.leases_path)]:
        path.unlink(missing_ok=True)
    if folder.card_path.is_file() and CARD_MARK.encode() in folder.card_path.read_bytes():
        folder.card_path.unlink()
    for kind in SHARD_FOLDERS:
        if (folder.path / kind).is_dir():
            fsync_folder(folder.path / kind)


def _tidy(folder: RunFolder) -> None:
    """Complete shards after a crash, and remove temporary files and leases that are not needed.

    Temporary files of leased shards may be in use, and are removed when the shard is complete.
    """
    for path in (folder.manifest_path, folder.config_path, folder.card_path):
        for temporary in folder.path.glob(f"{path.name}*{TEMPORARY_SUFFIX}"):
            temporary.unlink(missing_ok=True)
    files = _files_of(folder)
    # Read after the files: leases outlive them, and end when the shard is complete.
    leases = lease_files(folder.leases_path)
    leased = {shard for _, shard in leases}
    shards = sorted({shard for _, shard in files})
    for shard in shards:
        folder.complete_from_attempts(shard)
    complete = {shard for shard in shards if folder.is_complete(shard)}
    for shard in shards:
        if shard not in complete | leased and folder.data_path(shard).exists():
            logger.warning(
                "%s does not match its completion record (damaged, or partly deleted?): generating the "
                "shard again",
                folder.data_path(shard),
            )
    for path, shard in files:
        is_stale = path == folder.record_path(shard) or path.suffix == TEMPORARY_SUFFIX
        is_leftover = path.suffix == TEMPORARY_SUFFIX or path.parent.name == "parts"
        if is_leftover if shard in complete else is_stale and shard not in leased:
            path.unlink(missing_ok=True)
    for path, shard in leases:
        if shard in complete:
            path.unlink(missing_ok=True)


def remove_leftovers(folder: RunFolder) -> None:
    """Remove what killed replicas have left of a complete run on a store: copies of part logs that
    reached the store after their shard was complete, this machine's part logs and data that waited for an
    upload, and on S3 the parts of uploads that were never completed. What cannot be removed is harmless, and
    stays, as do the files of a run begun anew in its place."""
    path = folder.path
    if not isinstance(path, StorePath):
        return
    shutil.rmtree(path.cache_dir / f"run-{folder.run_tag}", ignore_errors=True)
    for file in (path.cache_dir / "files").glob(f"*/*{TEMPORARY_SUFFIX}"):
        file.unlink(missing_ok=True)
    retry_s, path.store.retry_s = path.store.retry_s, 0.0
    try:
        if folder.manifest.info.get(RUN_TAG, "") == folder.run_tag:
            parts = path / "parts"
            for name in path.store.below(parts.key):
                (parts / name).unlink(missing_ok=True)
            path.store.abort_uploads(path.key)
    except (OSError, UserError) as error:
        logger.info("part logs and parts of uploads that were cut short may be left in %s: %s", path, error)
    finally:
        path.store.retry_s = retry_s
