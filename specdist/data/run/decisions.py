"""Which replica's data becomes a shard's, on a store that cannot create an object exclusively.

Each replica uploads its data under a name of its own. Which of them it is to be is decided once and for all
by a file in a folder that all replicas share, which the file server lets only one of them create. The chosen
object is then copied to the shard's name, by its writer or by any other replica: all who copy, however late,
copy the same bytes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from specdist.data.store.files import publish, temporary_path, unique_tag
from specdist.data.store.storage import StorePath


def publish_decided(temporary: Path, path: Path, decision: Path) -> bool:
    """Give a finished local file its name on a store; False if another's has been chosen, which then has the
    name. Raises FileNotFoundError if ``temporary`` is gone."""
    assert isinstance(path, StorePath)
    own = path.with_name(temporary.name)
    own.upload(temporary)
    is_chosen = _decide(decision, own.name)
    go_on(path, decision)
    own.unlink(missing_ok=True)
    return is_chosen


def go_on(path: Path, decision: Path) -> None:
    """If data has been chosen and has not its name yet, give it the name."""
    assert isinstance(path, StorePath)
    try:
        chosen = decision.read_text()
    except FileNotFoundError:
        return
    if not path.is_file():
        # Not found: another replica did so, and removed what it had copied.
        with contextlib.suppress(FileNotFoundError):
            path.store.copy(path.with_name(chosen).key, path.key)


def _decide(decision: Path, name: str) -> bool:
    decision.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(decision, unique_tag())
    temporary.write_text(name)
    try:
        return publish(temporary, decision)
    finally:
        temporary.unlink(missing_ok=True)
