"""The folder of a run: its files, and how an unfinished shard becomes a complete one.

A shard's data file, statistics, trace and completion record become durable in this order; then its part logs
are removed. After a crash at any moment a shard is complete, can be completed from its files, or is generated
again from its part logs. :mod:`specdist.data.publishing` does so, also if several replicas work on one shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from specdist.data.claims import CLAIM_FILE, shard_and_split
from specdist.data.files import (
    TEMPORARY_SUFFIX,
    fsync_folder,
    unique_tag,
    unsealed,
    write_atomically,
    writing,
)
from specdist.data.layout import ADAPTED_FILES, CLAIMS_FOLDER, PROBE, SHARD_FOLDERS, RunLayout
from specdist.data.manifest import COMPLETIONS_PER_SHARD, Manifest, ShardPlan
from specdist.data.membership import is_membership_file
from specdist.data.parts import PartLog, read_rows, read_stats
from specdist.data.publishing import Attempt
from specdist.data.rows import RowResult
from specdist.data.segments import next_segment
from specdist.data.storage import StorePath, in_parallel
from specdist.data.stored_parts import StoredPartLog, forget_logs
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

logger = logging.getLogger(__name__)


# A README.md without this line was written by the user, and is kept.
CARD_MARK = "<!-- Written by specdist. --overwrite deletes this file while it has this line. -->"


class RunFolder(RunLayout):
    """A run's files. :meth:`open` creates or resumes a run; ``RunFolder(path)`` changes nothing by itself."""

    @staticmethod
    def open(
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

        Replicas must not open a folder at the same time: see :meth:`specdist.data.Membership.setup`.
        """
        folder = RunFolder(path)
        try:
            folder._claim(manifest, overwrite, find_another)
            write_atomically(folder.config_path, lambda file: file.write(config_yaml.encode()))
            if not is_tidied:
                folder._tidy()
        except OSError as error:
            raise UserError(f"--output {path} cannot be written: {error}") from error
        return folder

    def plan(self) -> ShardPlan:
        """The run's shards. Raises :class:`UserError` as :attr:`manifest` does."""
        manifest = self.manifest
        found, sums = manifest.fingerprint, manifest.info.get(COMPLETIONS_PER_SHARD)
        try:
            num_rows, rows_per_shard = int(found["num_rows"]), int(found["rows_per_shard"])
            return ShardPlan(num_rows, rows_per_shard, int(found["num_samples"]), sums)
        except (KeyError, TypeError, ValueError) as error:
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

    def parts(
        self, shard: int, generation: int = 0, rows: Collection[int] | None = None, split: int | None = None
    ) -> PartLog:
        """The log of the finished rows of a shard, or of a split of it, open for appending, with the rows of
        earlier generations and of the shard's other logs; close it before :meth:`finish_shard`."""
        self.make_folders(shard)
        logs = self.logs(shard)
        earlier = [log.path for log in logs if log.split == split and log.generation < generation]
        beside = [log.path for log in logs if log.split != split]
        path = self.parts_path(shard, generation, split)
        if isinstance(path, StorePath):
            record = self.record_path(shard)
            return StoredPartLog(
                path,
                self.spooled_log(path),
                earlier=earlier,
                beside=beside,
                rows=rows,
                is_complete=record.exists,
            )
        return PartLog(path, earlier=earlier, beside=beside, rows=rows)

    def spooled_log(self, path: Path) -> Path:
        """Where a part log of a run on a store is appended to."""
        assert isinstance(path, StorePath)
        return path.spool / f"run-{self.run_tag}" / path.name

    def part_rows(self, shard: int) -> list[RowResult]:
        """The finished rows in the shard's part logs, which replicas may be writing."""
        return read_rows(log.path for log in self.logs(shard))

    def split_stats(self, shard: int) -> list[dict[str, Any]]:
        """The latest statistics of every split of a shard that has any."""
        latest: dict[int, dict[str, Any]] = {}
        for log in self.logs(shard):
            if log.split is not None and (stats := read_stats(log.path)) is not None:
                latest[log.split] = stats
        return list(latest.values())

    def recorded_shards(self, among: Iterable[int] | None = None) -> set[int]:
        """The shards that have a completion record, by listings: their data is not looked at. Groups that
        have a total are not listed, nor, with ``among``, those that have none of these shards."""
        groups = self.groups() if among is None else sorted({self.group_of(shard) for shard in among})
        totalled = self.totalled_groups()
        num_shards = self.plan().num_shards if totalled else 0
        found = set[int]()
        for group in groups:
            if group in totalled:
                found.update(self.shards_of(group, num_shards))
            else:
                found |= self.recorded_in(group)
        return found

    def unrecorded_shards(self, num_shards: int) -> list[int]:
        """Of so many shards those without a completion record, ascending."""
        recorded = self.recorded_shards()
        return [shard for shard in range(num_shards) if shard not in recorded]

    def begun_shards(self) -> list[int]:
        """The shards that have part logs, ascending."""
        files = (file for group in self.groups() for file in self.files("parts", group))
        return sorted({int(match[1]) for path, match in files if path.suffix == ".jsonl"})

    def log_generations(self, shard: int) -> list[int]:
        """The generations of the shard's own part logs, ascending."""
        return [log.generation for log in self.logs(shard) if log.split is None]

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
            self.make_folders(shard)
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

    def trace_paths(self) -> list[Path]:
        """The traces of all complete shards that have one, in order."""
        paths = [self.trace_path(shard) for shard in self.complete_shards()]
        return [path for path in paths if path.is_file()]

    def complete_shards(self) -> list[int]:
        """Ascending; those whose data has not the recorded size are not among them."""
        return self.complete_among(sorted(self.recorded_shards()))

    def complete_among(self, shards: Sequence[int]) -> list[int]:
        """Those of these shards that are complete."""
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

    def missing_message(self, missing: Sequence[int]) -> str:
        """What to tell people about missing shards."""
        plan = self.plan()
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        return (
            f"{self.path} is not complete: {len(missing)} of {plan.num_shards} shards are missing "
            f"({shown}); start the run's command again to finish it"
        )

    def sweep(self, shard: int) -> None:
        """Remove a complete shard's part logs and the attempts of other replicas."""
        group = self.group_of(shard)
        for kind in SHARD_FOLDERS:
            for path, _ in self.files(kind, group, shard):
                if path.suffix == TEMPORARY_SUFFIX or kind == "parts":
                    path.unlink(missing_ok=True)
        if isinstance(self.path, StorePath):
            forget_logs(self.spooled_log(self.parts_path(shard)))
        fsync_folder(self.parts_path(shard).parent)

    def _claim(
        self, manifest: Manifest, overwrite: bool, find_another: Callable[[], str | None] | None
    ) -> None:
        """Give the folder to a run with this manifest, or refuse."""
        self.path.mkdir(parents=True, exist_ok=True)
        has_run = self.manifest_path.exists()
        if has_run:
            old = self.manifest
            # A run that failed before its first row, perhaps for the size of its cache, may be replaced.
            has_no_rows = not any(self._files_of(group) for group in self.groups())
            is_other = old.fingerprint != manifest.fingerprint
            is_replaced = overwrite or (has_no_rows and is_other)
            other = find_another() if is_replaced and find_another is not None else None
            if overwrite and other is not None:
                raise UserError(
                    f"--overwrite would delete the results that {other} is writing into --output "
                    f"{self.path}: wait for it to end, or stop it; without --overwrite this replica joins "
                    "that run"
                )
            if not overwrite and (other is not None or not has_no_rows):
                if (following := next_segment(old, manifest, self, find_another)) is not None:
                    following.write(self.manifest_path)
            elif has_no_rows and is_other:
                manifest.write(self.manifest_path)
        else:
            self._check_empty()
            # Written first: a folder with other files and without a manifest would be refused.
            manifest.write(self.manifest_path)
        for name in (*SHARD_FOLDERS, "logs"):
            (self.path / name).mkdir(exist_ok=True)
        if has_run and overwrite:
            self._delete_run_files()
            manifest.write(self.manifest_path)
        self._set_layout(self.manifest)
        fsync_folder(self.path)

    def _check_empty(self) -> None:
        """Allow logs, which a launcher may write, a crash's temporary manifest, and probes of a store."""
        others = sorted(entry.name for entry in self.path.iterdir() if not self._is_harmless(entry))
        if others:
            shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            raise UserError(
                f"--output {self.path} is not empty and is not a run folder (no manifest.json; it contains "
                f"{shown}): give a new folder. --overwrite deletes only files that a run has written"
            )

    def _is_harmless(self, entry: Path) -> bool:
        if entry.name == CLAIMS_FOLDER and entry.is_dir():
            return all(is_membership_file(file.name) for file in entry.iterdir())
        is_torn = entry.suffix == TEMPORARY_SUFFIX and entry.name.startswith(self.manifest_path.name)
        return entry.name == self.logs_path.name or is_torn or entry.name.startswith(f"{PROBE}.")

    def _files_of(self, group: str) -> list[tuple[Path, int]]:
        """All files of a group's shards, temporary ones too, with the shard's number; records come first."""
        found = [
            (path, int(match[1])) for kind in SHARD_FOLDERS for path, match in self.files(kind, group)
        ]  # fmt: skip
        return sorted(found, key=lambda file: file[0] != self.record_path(file[1]))

    def _delete_run_files(self) -> None:
        """Delete results, durably before the new manifest atomically replaces the old one."""
        groups = self.groups()
        paths = [self.total_path(group) for group in self.totalled_groups()]
        paths += [path for group in groups for path, _ in self._files_of(group)]
        for path in [*paths, *self.path.glob(ADAPTED_FILES), *(path for path, _ in self._claim_files())]:
            path.unlink(missing_ok=True)
        if self.card_path.is_file() and CARD_MARK.encode() in self.card_path.read_bytes():
            self.card_path.unlink()
        for folder in {self.path / kind / group for kind in SHARD_FOLDERS for group in {"", *groups}}:
            if folder.is_dir():
                fsync_folder(folder)

    def _claim_files(self) -> list[tuple[Path, int]]:
        """All claims of shards and their splits, with the shard's number, ascending."""
        return [
            (path, found[0])
            for path in sorted(self.claims_path.glob("s*"))
            if (match := CLAIM_FILE.fullmatch(path.name)) and (found := shard_and_split(match[1]))
        ]

    def _tidy(self) -> None:
        """Complete shards after a crash, and remove temporary files and claims that are not needed.

        Temporary files of claimed shards may be in use, and are removed when the shard is complete.
        """
        for path in (self.manifest_path, self.config_path, self.card_path):
            for temporary in self.path.glob(f"{path.name}*{TEMPORARY_SUFFIX}"):
                temporary.unlink(missing_ok=True)
        totalled = self.totalled_groups()
        for group in self.groups():
            files = self._files_of(group)
            if group in totalled and self._is_whole(group, files):
                continue
            if group in totalled:
                self.total_path(group).unlink(missing_ok=True)
                totalled.remove(group)
            self._tidy_group(files)
        if totalled:
            for path, shard in self._claim_files():
                if self.group_of(shard) in totalled:
                    path.unlink(missing_ok=True)

    def _is_whole(self, group: str, files: Sequence[tuple[Path, int]]) -> bool:
        """Whether each shard of a group has data, statistics and a record, and nothing else."""
        shards = self.shards_of(group, self.plan().num_shards)
        needed = {path for shard in shards for path in self.paths(shard).needed}
        found = {path for path, _ in files}
        return needed <= found and found <= needed | {self.trace_path(shard) for shard in shards}

    def _tidy_group(self, files: Sequence[tuple[Path, int]]) -> None:
        # Read after the files: claims outlive them, and end when the shard is complete.
        claims = self._claim_files()
        claimed = {shard for _, shard in claims}
        shards = sorted({shard for _, shard in files})
        for shard in shards:
            self.complete_from_attempts(shard)
        complete = {shard for shard in shards if self.is_complete(shard)}
        for shard in shards:
            if shard not in complete | claimed and self.data_path(shard).exists():
                logger.warning(
                    "%s does not match its completion record (damaged, or partly deleted?): generating the "
                    "shard again",
                    self.data_path(shard),
                )
        for path, shard in files:
            is_stale = path == self.record_path(shard) or path.suffix == TEMPORARY_SUFFIX
            is_leftover = path.suffix == TEMPORARY_SUFFIX or path.parent.name == "parts"
            if is_leftover if shard in complete else is_stale and shard not in claimed:
                path.unlink(missing_ok=True)
        for path, shard in claims:
            if shard in complete:
                path.unlink(missing_ok=True)
