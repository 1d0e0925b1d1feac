"""The folder of a run: its files, and how an unfinished shard becomes a complete one.

A shard's data file, statistics, trace and completion record become durable in this order; then its part logs
are removed. After a crash at any moment a shard is complete, can be completed from its files, or is generated
again from its part logs. :mod:`specdist.data.run.publishing` does so, also if several replicas work on one
shard.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from specdist.data.file_names import RECORD_FILE, SHARD_FILE, SHARD_FOLDERS, leases_in
from specdist.data.run.manifest import COMPLETIONS_PER_SHARD, Manifest, ShardPlan
from specdist.data.run.parts import PartLog, StoredPartLog, forget_logs, read_logs
from specdist.data.run.publishing import Attempt, ShardPaths
from specdist.data.stats.rows import RowResult
from specdist.data.store.files import (
    TEMPORARY_SUFFIX,
    fsync_folder,
    names_within,
    unique_tag,
    unsealed,
    writing,
)
from specdist.data.store.storage import StorePath, in_parallel
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

# A README.md without this line was written by the user, and is kept.
CARD_MARK = "<!-- Written by specdist. --overwrite deletes this file while it has this line. -->"


class RunFolder:
    """A run's files. ``RunFolder(path)`` changes nothing by itself; :mod:`specdist.data.leases.opening`
    creates or resumes a run. Sorted by path, the shards' data is in input order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Of a stored run, the name of its files on each machine; a run begun anew has another.
        self.run_tag = ""

    @property
    def manifest(self) -> Manifest:
        """The manifest in force. Raises :class:`UserError` if it is missing or damaged."""
        return Manifest.read(self.manifest_path)

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def card_path(self) -> Path:
        """The card of a complete run: see :mod:`specdist.job.totals.card`."""
        return self.path / "README.md"

    @property
    def logs_path(self) -> Path:
        return self.path / "logs"

    def data_path(self, shard: int) -> Path:
        return self.path / "shards" / f"shard-{shard:05d}.arrow"

    def record_path(self, shard: int) -> Path:
        return self.path / "shards" / f"shard-{shard:05d}.json"

    def stats_path(self, shard: int) -> Path:
        return self.path / "stats" / f"shard-{shard:05d}.json"

    def trace_path(self, shard: int) -> Path:
        """Exists in runs with ``--trace``."""
        return self.path / "stats" / f"shard-{shard:05d}.trace.arrow"

    def parts_path(self, shard: int, generation: int = 0) -> Path:
        """The log of the holder of this lease of the shard; generation 0 is that of a run without leases."""
        middle = f".{generation:05d}" if generation else ""
        return self.path / "parts" / f"shard-{shard:05d}{middle}.jsonl"

    def paths(self, shard: int) -> ShardPaths:
        return ShardPaths(
            data=self.data_path(shard),
            stats=self.stats_path(shard),
            trace=self.trace_path(shard),
            record=self.record_path(shard),
        )

    @property
    def leases_path(self) -> Path:
        """The folder of leases and heartbeats."""
        return leases_in(self.path)

    def files(self, kind: str, shard: int | None = None) -> list[tuple[Path, re.Match[str]]]:
        """The files of all shards, or of one of them, in one of :data:`SHARD_FOLDERS`, temporary ones too,
        sorted by name; by one listing."""
        folder = self.path / kind
        start = "shard-" if shard is None else f"shard-{shard:05d}."
        found = map(SHARD_FILE.fullmatch, sorted(names_within(folder, start)))
        return [(folder / match[0], match) for match in found if match]

    def logs(self, shard: int) -> dict[int, Path]:
        """The part logs of a shard by ascending generation of its lease, by one listing."""
        files = self.files("parts", shard)
        return dict(sorted((int(match[2] or 0), path) for path, match in files if path.suffix == ".jsonl"))

    def recorded_shards(self) -> set[int]:
        """The shards that have a completion record, by one listing: their data is not looked at."""
        names = names_within(self.path / "shards")
        return {int(match[1]) for name in names if (match := RECORD_FILE.fullmatch(name))}

    def plan(self) -> ShardPlan:
        """The run's shards. Raises :class:`UserError` as :attr:`manifest` does."""
        manifest = self.manifest
        found, sums = manifest.fingerprint, manifest.info.get(COMPLETIONS_PER_SHARD)
        try:
            names = ("num_rows", "rows_per_shard", "num_samples")
            num_rows, rows_per_shard, num_samples = (int(found[name]) for name in names)
            return ShardPlan(num_rows, rows_per_shard, num_samples, sums)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UserError(
                f"{self.manifest_path} does not say how many rows the run has: {error!r}"
            ) from error

    def freeze(self, name: str, value: Any) -> None:
        """Add a value measured at the start to the manifest's ``info``, for restarts to use again."""
        manifest = self.manifest
        with writing(self.manifest_path):
            replace(manifest, info={**manifest.info, name: value}).write(self.manifest_path)

    def is_complete(self, shard: int) -> bool:
        """Whether the shard has a completion record, statistics, and data of the recorded size."""
        return self.paths(shard).is_complete()

    def parts(self, shard: int, generation: int = 0, rows: Collection[int] | None = None) -> PartLog:
        """The log of the finished rows of a shard, open for appending, with the rows of earlier generations;
        close it before :meth:`finish_shard`."""
        earlier = [log for number, log in self.logs(shard).items() if number < generation]
        path = self.parts_path(shard, generation)
        if isinstance(path, StorePath):
            is_complete = self.record_path(shard).exists
            return StoredPartLog(
                path, self.cached_log(path), earlier=earlier, rows=rows, is_complete=is_complete
            )
        return PartLog(path, earlier=earlier, rows=rows)

    def cached_log(self, path: Path) -> Path:
        """Where a part log of a run on a store is appended to."""
        assert isinstance(path, StorePath)
        return path.cache_dir / f"run-{self.run_tag}" / path.name

    def part_logs(self, shard: int) -> tuple[list[RowResult], dict[str, Any] | None]:
        """The finished rows in the shard's part logs, which replicas may be writing, and their statistics."""
        return read_logs(self.logs(shard).values())

    def unrecorded_shards(self, num_shards: int) -> list[int]:
        """The shards, of so many, without a completion record, ascending."""
        recorded = self.recorded_shards()
        return [shard for shard in range(num_shards) if shard not in recorded]

    def begun_shards(self) -> list[int]:
        """The shards that have part logs, ascending."""
        return sorted({int(match[1]) for path, match in self.files("parts") if path.suffix == ".jsonl"})

    def log_generations(self, shard: int) -> list[int]:
        """The generations of the shard's part logs, ascending."""
        return list(self.logs(shard))

    def finish_shard(
        self,
        shard: int,
        table: pa.Table,
        stats: dict[str, Any],
        trace: pa.Table | None = None,
        is_held: Callable[[], bool] | None = None,
    ) -> bool:
        """Write a shard's output, statistics and trace, record that it is complete, and drop its part logs.

        It can be called again after a crash. Of several replicas that finish a shard, the one that makes it
        complete gets True, be it with its own files or with those that another left unpublished. The others
        get False and change nothing, as does a replica for which ``is_held`` turned false. Raises
        :class:`UserError` if the disk fails; then existing files are unchanged.
        """
        with writing(self.data_path(shard)):
            attempt = Attempt(self.paths(shard), unique_tag())
            is_written = attempt.write(table, stats, trace)
            # Asked after writing: a replica that deletes this run deletes these files too, or is noticed.
            if not is_written or (is_held is not None and not is_held()):
                attempt.discard()
                return False
            if attempt.publish_data():
                attempt.finish()
            elif self.complete_from_attempts(shard):
                attempt.discard()
            elif not self.is_complete(shard) and attempt.replace_data():
                attempt.finish()
            else:
                attempt.discard()
                return False
            self.sweep(shard)
            return True

    def complete_from_attempts(self, shard: int) -> bool:
        """Complete a shard that a crash stopped between its data and its record; False if there is none."""
        if self.is_complete(shard):
            return False
        attempt = Attempt.that_won(self.paths(shard))
        if attempt is None:
            return False
        attempt.finish()
        return self.is_complete(shard)

    def shard_stats(self) -> list[dict[str, Any]]:
        """The statistics of all complete shards, in order."""
        return [self.read_stats(shard) for shard in self.complete_shards()]

    def complete_shards(self) -> list[int]:
        """Ascending; those whose data has not the recorded size are not among them."""
        return self.complete_among(sorted(self.recorded_shards()))

    def complete_among(self, shards: Sequence[int]) -> list[int]:
        """The complete ones of these shards."""
        found = in_parallel(self.path, self.is_complete, shards)
        return [shard for shard, is_complete in zip(shards, found, strict=True) if is_complete]

    def read_stats(self, shard: int) -> dict[str, Any]:
        """The statistics of a complete shard. Raises :class:`UserError` if they are damaged."""
        path = self.stats_path(shard)
        try:
            return unsealed(parse_object(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is damaged ({error}), but not the rows of the shard: delete it, and start the run's "
                "command again, which generates the shard again, with the same rows"
            ) from error

    def missing_shards(self) -> list[int]:
        """The shards that are not complete. Raises :class:`UserError` as :attr:`manifest` does."""
        plan = self.plan()
        complete = set(self.complete_among(range(plan.num_shards)))
        return [shard for shard in range(plan.num_shards) if shard not in complete]

    def finished_files(self, *, unfinished: bool) -> list[Path]:
        """The data of complete shards, for ``--prompts``. Raises :class:`UserError` if some are missing,
        unless the run may be ``unfinished``, and if all are."""
        missing = self.missing_shards()
        found = sorted({*range(self.plan().num_shards)} - {*missing})
        if missing and not (unfinished and found):
            more = ", or read the finished shards alone with --unfinished" if found else ""
            raise UserError(f"--prompts {self.missing_message(missing)}{more}")
        return [self.data_path(shard) for shard in found]

    def missing_message(self, missing: Sequence[int]) -> str:
        """What to tell people about missing shards."""
        plan = self.plan()
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        return (
            f"{self.path} is not complete: {len(missing)} of {plan.num_shards} shards are missing "
            f"({shown}); unless it is at work (python jobs/status.py {self.path}), start its command again"
        )

    def sweep(self, shard: int) -> None:
        """Remove a complete shard's part logs and the attempts of other replicas."""
        for kind in SHARD_FOLDERS:
            for path, _ in self.files(kind, shard):
                if path.suffix == TEMPORARY_SUFFIX or kind == "parts":
                    path.unlink(missing_ok=True)
        if isinstance(self.path, StorePath):
            forget_logs(self.cached_log(self.parts_path(shard)))
        fsync_folder(self.parts_path(shard).parent)


def run_of(path: Path) -> RunFolder | None:
    """The run in this folder, or of this folder ``shards``; None if there is none."""
    for folder in (path, path.parent) if path.name == "shards" else (path,):
        with contextlib.suppress(OSError, ValueError):
            if "fingerprint" in parse_object(RunFolder(folder).manifest_path.read_bytes()):
                return RunFolder(folder)
    return None
