"""The leases of many simulated replicas in an index, so that thousands of them can be simulated.

A look at the leases may be as old as ``STALE_S``, as on a file server whose clients keep what they have
listed; its cost is counted each time.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from specdist.data.leases import heartbeat, lease_folders, leases
from specdist.data.leases.leases import Lease, Leases, View, shard_and_sub_shard
from specdist.data.run.run_folder import RunFolder
from tests.scale.counting import METADATA, NAMES_PER_OPERATION, CountingFiles
from tests.scale.events import Events

STALE_S = 0.25


class Indexed:
    """While :meth:`patched`, the leases' folder is listed at most every ``STALE_S`` of the virtual clock, and
    what is asked of one shard is answered from the index; both are counted as if the folder had been listed
    each time."""

    def __init__(self, events: Events, files: CountingFiles) -> None:
        self._events, self._files = events, files
        self._view: tuple[int, View] | None = None
        # Of the last look: the operations, and the names in each folder.
        self._num_operations = 0
        self.num_names: dict[str, int] = {}
        self._names: dict[int | None, set[str]] = defaultdict(set)
        # Of each group of shards, those that have a record, and the operations of the listing.
        self._recorded: dict[str, tuple[set[int], int]] = {}

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        create, remove, original_look, names_in = Leases._create, Leases._remove, Leases.look, leases.names_in
        finish_shard, recorded_in = RunFolder.finish_shard, RunFolder.recorded_in

        def finish(self_: RunFolder, shard: int, *arguments: Any, **options: Any) -> bool:
            try:
                return finish_shard(self_, shard, *arguments, **options)
            finally:
                self._recorded.pop(self_.group_of(shard), None)

        def recorded(self_: RunFolder, group: str) -> set[int]:
            if group in self._recorded:
                self._files.counts[METADATA] += self._recorded[group][1]
            else:
                before = self._files.counts[METADATA]
                found = recorded_in(self_, group)
                self._recorded[group] = found, self._files.counts[METADATA] - before
            return self._recorded[group][0]

        def indexed_create(self_: Leases, lease: Lease, *arguments: Any) -> bool:
            is_made = create(self_, lease, *arguments)
            if is_made:
                self._names[_shard_of(lease.name)].add(_last(lease.file_name))
            return is_made

        def indexed_remove(self_: Leases, lease: Lease) -> None:
            remove(self_, lease)
            self._names[_shard_of(lease.name)].discard(_last(lease.file_name))

        def look(self_: Leases) -> View:
            moment = int(self._events.now / STALE_S)
            if self._view is None or self._view[0] != moment or not self._view[1].latest:
                before = self._files.counts[METADATA]
                self._view = moment, original_look(self_)
                self._num_operations = self._files.counts[METADATA] - before
            else:
                self._files.counts[METADATA] += self._num_operations
            return self._view[1]

        def looked(folder: Path) -> list[str]:
            names = names_in(folder)
            self.num_names[str(folder)] = len(names)
            return names

        def listed(folder: Path, *prefixes: str) -> list[str]:
            self._files.counts[METADATA] += 1 + self.num_names.get(str(folder), 0) // NAMES_PER_OPERATION
            shards = {_shard_of(prefix.rstrip(".-")) for prefix in prefixes}
            return [name for shard in shards for name in self._names[shard] if name.startswith(prefixes)]

        with (
            mock.patch.object(Leases, "_create", indexed_create),
            mock.patch.object(Leases, "_remove", indexed_remove),
            mock.patch.object(Leases, "look", look),
            mock.patch.object(lease_folders, "names_in", looked),
            mock.patch.object(leases, "names_in", listed),
            mock.patch.object(RunFolder, "finish_shard", finish),
            mock.patch.object(RunFolder, "recorded_in", recorded),
            mock.patch.object(heartbeat, "_machine", lambda: "the simulation's"),
        ):
            yield


def _last(file_name: str) -> str:
    return file_name.rpartition("/")[2]


def _shard_of(name: str) -> int | None:
    """Of a lease, or of the beginning of one."""
    found = shard_and_sub_shard(name) or shard_and_sub_shard(f"{name}-00000")
    return None if found is None else found[0]
