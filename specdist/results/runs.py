"""Reads the folder of a run: completions, statistics and settings.

    import specdist

    run = specdist.load_run("runs/mine")
    run.dataset[0]["completion"], run.statistics["tokens_per_s"], run.is_complete

``load_run(path, include_parts=True)`` also reads the rows that unfinished shards have so far.

:mod:`specdist.data.stats.schema` describes the columns and the statistics. Imports no torch, and changes
nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from specdist.data.run.manifest import Manifest
from specdist.data.run.publishing import ShardRecord
from specdist.data.run.reading import damaged, open_shard
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import RowResult, results_table
from specdist.data.stats.shard import Stats
from specdist.data.store.copies import mirrored
from specdist.job.totals.report import totals_document
from specdist.job.totals.totals import read_finished
from specdist.utils.errors import UserError
from specdist.utils.packages import check_installed

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)


def load_run(path: str | Path, *, verify: bool = False, include_parts: bool = False) -> Run:
    """The run in a folder. If it is not complete, a warning names what is missing.

    Sizes of files are always compared with the recorded ones.

    Args:
        path: the run's ``--output``. A run in a bucket is fetched into a folder for temporary files first.
        verify: also read every finished shard and compare it with its checksum.
        include_parts: ``dataset`` and ``table`` also have the rows of unfinished shards, in input order, with
            nulls in their input columns. Everything else (``statistics``, ``finished_shards``) is that of
            finished shards.

    Raises :class:`specdist.utils.errors.UserError` (a ValueError) if the folder is not that of a run, or a
    file of a finished shard is damaged.
    """
    folder = RunFolder(Path(mirrored(path)))
    manifest = folder.manifest
    if "kind" in manifest.fingerprint or "exact" not in manifest.info:
        raise UserError(
            f"{path} is not the folder of a run of jobs/generate.py (of jobs/collect.py, the run is "
            "responses/ in it): its manifest.json says nothing of completions"
        )
    plan = folder.plan()
    # Read before the shards are listed: a shard that is finished meanwhile counts as finished.
    parts = _read_parts(folder, plan.num_shards) if include_parts else {}
    complete = set(folder.complete_among(range(plan.num_shards)))
    finished = tuple(
        shard for shard in range(plan.num_shards) if shard in complete or _is_now_finished(folder, shard)
    )
    run = Run(
        path=folder.path,
        manifest=manifest,
        num_shards=plan.num_shards,
        finished_shards=finished,
        parts={shard: rows for shard, rows in parts.items() if shard not in set(finished)},
    )
    if verify:
        for shard in finished:
            open_shard(folder.paths(shard), verify=True)
    if not run.is_complete:
        logger.warning("%s", folder.missing_message(run.missing_shards))
    return run


@dataclass(frozen=True, kw_only=True)
class Run:
    """The contents of a run's folder when it was loaded; rows and statistics are read at their first use.

    Attributes:
        path: the folder.
        manifest: ``manifest.fingerprint`` decides the output, ``manifest.info`` is further information.
        num_shards: of the whole run; ``finished_shards``: the finished ones, ascending.
        parts: rows of unfinished shards, by shard; empty without ``include_parts``.
    """

    path: Path
    manifest: Manifest
    num_shards: int
    finished_shards: tuple[int, ...]
    parts: Mapping[int, Sequence[RowResult]] = field(default_factory=dict, repr=False)

    @property
    def exact(self) -> bool:
        """Whether the completions follow the target's own distribution; False for lossy runs."""
        return bool(self.manifest.info["exact"])

    @property
    def is_complete(self) -> bool:
        return len(self.finished_shards) == self.num_shards

    @property
    def missing_shards(self) -> tuple[int, ...]:
        finished = set(self.finished_shards)
        return tuple(shard for shard in range(self.num_shards) if shard not in finished)

    @cached_property
    def dataset(self) -> datasets.Dataset:
        """The rows of all finished shards, memory-mapped, and of :attr:`parts`, in input order.

        Pickling it (``num_proc`` of its methods) copies it. Raises UserError if there are no rows.
        """
        check_installed("datasets", "Run.dataset", "use Run.table, the same rows in Arrow")
        import datasets

        return datasets.Dataset(self.table, fingerprint=self._digest())

    @cached_property
    def table(self) -> pa.Table:
        """The same rows as an Arrow table."""
        if not self.finished_shards and not self.parts:
            raise UserError(
                f"{self.path} has no finished shard to read yet: wait, or start the run's command again to "
                "resume it; python jobs/status.py shows its progress, and load_run(..., include_parts=True) "
                "reads the rows of unfinished shards"
            )
        tables = {
            shard: open_shard(self._folder.paths(shard), verify=False) for shard in self.finished_shards
        }
        schema = tables[self.finished_shards[0]].schema if tables else None
        for shard, table in tables.items():
            if not table.schema.equals(schema):
                first = self._folder.data_path(self.finished_shards[0])
                raise UserError(f"{self._folder.data_path(shard)} has other columns than {first}")
        tables |= {shard: results_table(rows, schema) for shard, rows in self.parts.items()}
        return pa.concat_tables(tables[shard] for shard in sorted(tables))

    @cached_property
    def statistics(self) -> dict[str, Any]:
        """The totals of all finished shards, as in the last line that the run prints."""
        return totals_document(
            self._folder,
            self.stats,
            num_devices=self.manifest.info.get("num_devices", self.manifest.info["world_size"]),
            is_complete=self.is_complete,
        )

    @cached_property
    def shards(self) -> Mapping[int, Stats]:
        """The statistics of each finished shard by its number."""
        return {each.shard: each.stats for each in read_finished(self._folder, self.finished_shards)}

    @cached_property
    def stats(self) -> Stats:
        """The sum of all finished shards' statistics."""
        total = Stats()
        for each in self.shards.values():
            total.add(each)
        return total

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.path)

    def _digest(self) -> str:
        """A digest of the shards' recorded checksums. `datasets` caches results under it; for a digest of its
        own it would read all rows."""
        records = [ShardRecord.read(self._folder.record_path(shard)) for shard in self.finished_shards]
        digest = hashlib.sha256("".join(record.sha256 for record in records if record is not None).encode())
        for _, rows in sorted(self.parts.items()):
            for row in rows:
                digest.update(row.to_json())
        return digest.hexdigest()[:16]


def _read_parts(folder: RunFolder, num_shards: int) -> dict[int, Sequence[RowResult]]:
    """The rows of unfinished shards, by shard."""
    found = {shard: folder.part_logs(shard)[0] for shard in folder.begun_shards() if shard < num_shards}
    return {shard: rows for shard, rows in found.items() if rows}


def _is_now_finished(folder: RunFolder, shard: int) -> bool:
    """Whether a shard that was not complete a moment ago is now. Raises UserError for a finished shard whose
    files are missing or damaged."""
    if ShardRecord.read(folder.record_path(shard)) is None:
        return False
    if not folder.is_complete(shard):
        raise damaged(folder.paths(shard))
    return True
