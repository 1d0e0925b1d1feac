"""Weight files on a disk of the node: copied once, whoever comes at the same time, and checked."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdist.config.groups import StorageOptions
from specdist.models.files import staged_files
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.staged_files import staged
from specdist.utils.errors import UserError
from specdist.utils.rules import check_options

NUM_BYTES = 1000


def checkpoint_of(folder: Path, name: str) -> Checkpoint:
    """Two files of so many bytes together."""
    place = folder / name
    place.mkdir()
    files = tuple(place / f"{number}.safetensors" for number in range(2))
    for path in files:
        path.write_bytes(os.urandom(NUM_BYTES // 2))
    return Checkpoint(
        option="--target", name=name, folder=place, config=SimpleNamespace(), weight_files=files
    )


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were copied."""
    found: list[str] = []
    crc32 = staged_files._crc32

    def counting(path: Path, on_step: Any, copy: Path | None = None) -> int:
        if copy is not None:
            found.append(path.name)
            # Others come meanwhile.
            time.sleep(0.02)
        return crc32(path, on_step, copy)

    monkeypatch.setattr(staged_files, "_crc32", counting)
    return found


def contents(
    checkpoint: Checkpoint, folder: Path, *, limit: int | None = None, since: float = 0.0
) -> tuple[bool, list[bytes]]:
    """Whether the files are in the folder, and what is in them."""
    with staged(checkpoint, folder, limit_bytes=limit, checked_since=since) as found:
        is_there = all(path.is_relative_to(folder) for path in found.weight_files)
        return is_there, [path.read_bytes() for path in found.weight_files]


def sources(checkpoint: Checkpoint) -> list[bytes]:
    return [path.read_bytes() for path in checkpoint.weight_files]


def test_several_at_the_same_time_copy_each_file_once(tmp_path: Path, copied: list[str]) -> None:
    checkpoint = checkpoint_of(tmp_path, "model")
    found: list[tuple[bool, list[bytes]]] = []
    threads = [
        threading.Thread(target=lambda: found.append(contents(checkpoint, tmp_path / "disk")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == 3 * [(True, sources(checkpoint))]
    assert sorted(copied) == ["0.safetensors", "1.safetensors"]


def test_a_damaged_copy_and_that_of_another_file_are_made_again(tmp_path: Path, copied: list[str]) -> None:
    checkpoint, disk = checkpoint_of(tmp_path, "model"), tmp_path / "disk"
    contents(checkpoint, disk)
    copy = next(disk.glob("*/1.safetensors"))
    copy.write_bytes(copy.read_bytes()[::-1])
    assert contents(checkpoint, disk, since=time.time() + 60) == (True, sources(checkpoint))
    assert copied == ["0.safetensors", "1.safetensors", "1.safetensors"]
    os.utime(checkpoint.weight_files[0], ns=(0, 12345))
    assert contents(checkpoint, disk) == (True, sources(checkpoint))
    assert copied[3:] == ["0.safetensors"]


def test_what_was_used_longest_ago_makes_room_but_not_what_is_in_use(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    first, second, third = (checkpoint_of(tmp_path, name) for name in ("first", "second", "third"))
    limit = 2 * NUM_BYTES + 500
    contents(first, disk, limit=limit)
    with staged(second, disk, limit_bytes=limit, checked_since=0.0) as used:
        assert contents(third, disk, limit=limit) == (True, sources(third))
        assert len(list(disk.glob("*/0.safetensors"))) == 2
        # The first has gone; with the second in use and the third not, the third makes room.
        assert contents(first, disk, limit=limit)[0]
        assert [path.read_bytes() for path in used.weight_files] == sources(second)
        assert contents(third, disk, limit=NUM_BYTES + 300) == (False, sources(third))
    assert contents(third, disk, limit=NUM_BYTES - 1) == (False, sources(third))


def test_a_disk_that_fails_is_not_used(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, "model")
    (tmp_path / "disk").write_text("a file")
    assert contents(checkpoint, tmp_path / "disk") == (False, sources(checkpoint))


def test_a_limit_needs_a_folder_and_is_a_size() -> None:
    check_options(StorageOptions(stage_limit="5GB", stage_weights="disk"))
    for options, message in (
        (StorageOptions(stage_limit="5GB"), "--stage_limit 5GB has no effect without --stage_weights"),
        (StorageOptions(stage_limit="much", stage_weights="disk"), "--stage_limit 'much' is not a size"),
    ):
        with pytest.raises(UserError, match=message):
            check_options(options)
