"""A run on an object store as a local folder, for those who read it: its files are fetched into the spool.

Only what is new or has changed is fetched again. Rows are then memory-mapped, as those of any run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from specdist.data.run.layout import CLAIMS_FOLDER, RECORD_FILE
from specdist.data.store.access import explain
from specdist.data.store.files import write_json
from specdist.data.store.object_store import ObjectInfo
from specdist.data.store.storage import StorePath, in_parallel, storage_path
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

# Names and versions of the files that are there.
INDEX = "mirror.json"
# Not needed to read a run.
LEFT_OUT = (f"{CLAIMS_FOLDER}/", "logs/", "tensorboard/")


def mirrored(run: str | Path, *, spool: str | None = None) -> Path:
    """The folder to read a run from: a path is its own. Raises :class:`UserError` if the store cannot be
    read, or has no run there."""
    path = storage_path(run, spool=spool) if isinstance(run, str) else run
    if not isinstance(path, StorePath):
        return path
    with explain(str(path), path):
        found = _consistent(path.store.below(path.key))
        if "manifest.json" not in found:
            raise UserError(f"{path} is not a run: there is no manifest.json. Give what --output was")
        folder = path.spool / "mirror" / path.name
        folder.mkdir(parents=True, exist_ok=True)
        known = _known(folder / INDEX)
        versions = {name: info.version or f"{info.st_size} {info.st_mtime}" for name, info in found.items()}
        new = [name for name, version in versions.items()
               if known.get(name) != version or not (folder / name).is_file()]  # fmt: skip
        in_parallel(path, lambda name: _fetch(path, name, folder / name), new)
        for name in known.keys() - found.keys():
            (folder / name).unlink(missing_ok=True)
        write_json(folder / INDEX, versions)
    return folder


def _consistent(found: Mapping[str, ObjectInfo]) -> dict[str, ObjectInfo]:
    """Without the records of shards that were finished while the names were listed."""
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


def _fetch(run: StorePath, name: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    run.store.download((run / name).key, temporary)
    temporary.replace(file)
