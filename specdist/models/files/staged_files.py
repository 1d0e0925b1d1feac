"""Weight files copied to a disk of this node once, for all replicas and ranks there (``--stage_weights``).

Each file has a lock: whoever gets it copies the file, the others wait and find it. A copy counts if its
source has still the size and time that it had, and its own bytes the checksum that was taken while it was
written; that is computed again once after a process's start. Copies of other checkpoints that nobody uses
make room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from specdist.models.files.checkpoint import Checkpoint

COPY_BYTES = 16 * 2**20
WAIT_S = 0.2
IN_USE, RECORD_SUFFIX, COPYING_SUFFIX = "in-use.lock", ".json", ".copying"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Record:
    """What a copy was made of: its source's size and time of change, and the CRC-32 of its bytes."""

    num_bytes: int
    mtime_ns: int
    crc32: int


@contextlib.contextmanager
def staged(
    checkpoint: Checkpoint,
    folder: Path | None,
    *,
    limit_bytes: int | None,
    checked_since: float,
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[Checkpoint]:
    """The checkpoint with its weight files in ``folder``, as long as they are used; itself without a folder,
    or, with a warning, where there is no room or the disk fails.

    Args:
        limit_bytes: of all checkpoints in the folder; None: what the disk has room for.
        checked_since: Unix time; copies whose checksum was compared since then need no other look.
        on_step: called as the copying goes on, by whomever.
    """
    if folder is None:
        yield checkpoint
        return
    with contextlib.ExitStack() as stack:
        try:
            place = folder / checkpoint.fingerprint()[:16]
            place.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(place / IN_USE, on_step, is_shared=True))
            with _locked(folder / "room.lock", on_step):
                is_room = _make_room(folder, place, checkpoint, limit_bytes)
            if is_room:
                files = tuple(
                    _staged_file(path, place, checked_since, on_step) for path in checkpoint.weight_files
                )
                staged_checkpoint = dataclasses.replace(checkpoint, weight_files=files)
            else:
                logger.warning(
                    "--stage_weights %s has no room for %s %s: its files are read where they are",
                    folder, checkpoint.option, checkpoint.name,
                )  # fmt: skip
                staged_checkpoint = checkpoint
        except OSError as error:
            logger.warning(
                "--stage_weights %s cannot be used for %s (%s): its files are read where they are",
                folder, checkpoint.name, error,
            )  # fmt: skip
            staged_checkpoint = checkpoint
        yield staged_checkpoint


def _staged_file(source: Path, place: Path, checked_since: float, on_step: Callable[[], None]) -> Path:
    """A copy of a file, made or found."""
    copy, record_path = place / source.name, place / f"{source.name}{RECORD_SUFFIX}"
    with _locked(place / f"{source.name}.lock", on_step):
        stat = source.stat()
        try:
            record = _Record(**json.loads(record_path.read_bytes()))
            is_right = (record.num_bytes, record.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
            if is_right and copy.stat().st_mtime < checked_since:
                is_right = _crc32(copy, on_step) == record.crc32
                os.utime(copy)
        except (OSError, ValueError, TypeError):
            is_right = False
        if not is_right:
            record_path.unlink(missing_ok=True)
            temporary = place / f"{source.name}{COPYING_SUFFIX}"
            crc32 = _crc32(source, on_step, temporary)
            temporary.replace(copy)
            record = _Record(stat.st_size, stat.st_mtime_ns, crc32)
            record_path.write_text(json.dumps(dataclasses.asdict(record)))
    return copy


def _crc32(path: Path, on_step: Callable[[], None], copy: Path | None = None) -> int:
    """Of a file, read in sequence, and copied on the way."""
    crc32 = 0
    with path.open("rb", buffering=0) as file, contextlib.ExitStack() as stack:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        target = None if copy is None else stack.enter_context(copy.open("wb"))
        while piece := file.read(COPY_BYTES):
            crc32 = zlib.crc32(piece, crc32)
            if target is not None:
                target.write(piece)
            on_step()
        if target is not None:
            target.flush()
            os.fsync(target.fileno())
    return crc32


def _make_room(folder: Path, place: Path, checkpoint: Checkpoint, limit_bytes: int | None) -> bool:
    """Delete the checkpoints that were used longest ago until there is room; False if there cannot be."""
    needed = sum(path.stat().st_size for path in checkpoint.weight_files)
    others = sorted(
        (path for path in folder.iterdir() if (path / IN_USE).is_file() and path != place),
        key=lambda path: (path / IN_USE).stat().st_mtime,
    )
    if limit_bytes is not None and needed > limit_bytes:
        return False
    while True:
        free = shutil.disk_usage(folder).free + _size_of(place)
        if limit_bytes is not None:
            free = min(free, limit_bytes - sum(map(_size_of, others)))
        if needed <= free:
            return True
        unused = next(filter(_delete_unused, others), None)
        if unused is None:
            return False
        others.remove(unused)


def _size_of(place: Path) -> int:
    return sum(path.stat().st_size for path in place.iterdir())


def _delete_unused(place: Path) -> bool:
    """False if it is in use."""
    with (place / IN_USE).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        shutil.rmtree(place)
        return True


@contextlib.contextmanager
def _locked(path: Path, on_step: Callable[[], None], *, is_shared: bool = False) -> Iterator[None]:
    """Waits for others, as long as what they copy grows."""
    with path.open("ab") as file:
        size = -1
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if (found := _size_of(path.parent)) != size:
                    size = found
                    on_step()
                time.sleep(WAIT_S)
        os.utime(path)
        yield
