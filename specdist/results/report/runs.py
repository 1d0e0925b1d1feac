"""A run as a report shows it: manifest, options, statistics of its shards, lengths, errors and trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from specdist.data.run.reading import read_columns
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.regression import NS_PER_S
from specdist.data.stats.shard import Stats
from specdist.job.totals.spending import options_of
from specdist.job.totals.status import RunStatus, StatusReader, error_kind
from specdist.job.totals.totals import FinishedShard, read_finished
from specdist.policies.registry import OPTION_NAMES
from specdist.results.report.formats import NOTHING
from specdist.results.runs import load_run
from specdist.utils.errors import UserError

ERROR_COLUMNS = ("row_id", "sample_index", "prompt", "error")
TRACE_COLUMNS = ("entropy", "is_verified", "is_accepted")
MAX_SHARDS_READ = 50
MAX_ROWS_SHOWN = 20
MAX_PROMPT_CHARACTERS = 80
# About three million tokens: more would not improve the figures.


@dataclass(frozen=True)
class ErrorRows:
    """The first rows with errors, each with its place, its reason and the beginning of its prompt; and the
    number of failed completions by reason in the shards read."""

    rows: Sequence[tuple[str, str, str]]
    kinds: Mapping[str, int]
    num_shards: int
    num_shards_read: int


@dataclass(frozen=True)
class ReportedRun:
    """A run as it is now.

    Attributes:
        place, label: its place among the runs of a report, and its name there.
        config: the resolved options with the policy's defaults; only these if ``config.yaml`` is missing.
        info: further information of its manifest.
        shards: the finished ones of ``num_shards``.
        status: progress; None for a complete run.
        lengths: [C] tokens of the completions of some shards, spread over the run.
        trace: drafted tokens with :data:`TRACE_COLUMNS`, of some shards too; None without ``--trace``.
    """

    place: int
    label: str
    folder: RunFolder
    config: Mapping[str, Any]
    info: Mapping[str, Any]
    num_shards: int
    shards: Sequence[FinishedShard]
    status: RunStatus | None
    errors: ErrorRows
    lengths: np.ndarray
    trace: pa.Table | None

    @cached_property
    def total(self) -> Stats:
        """The sum of the finished shards' statistics."""
        found = Stats()
        for shard in self.shards:
            found.add(shard.stats)
        return found

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        return self.total.summary(self.num_devices)

    @property
    def is_exact(self) -> bool:
        return bool(self.info["exact"])

    @property
    def is_lossy(self) -> bool:
        """Tokens were committed unverified; of other runs that are not exact the target was not compared."""
        return self.config.get("policy") == "sprinter" and self.config.get("verify", "doubted") == "doubted"

    @property
    def num_devices(self) -> int:
        """Ranks of a replica; each has a GPU of its own if there are GPUs."""
        return int(self.info.get("world_size", 1))

    @property
    def ranks(self) -> str:
        """The number of ranks, and which of them holds the draft."""
        holder = {"own": " (one for the draft)", "shared": " (the first has the draft, too)"}
        return f"{self.num_devices}{holder.get(self.info.get('draft_placement') or '', '')}"

    @property
    def has_drafts(self) -> bool:
        return self.total.num_drafts > 0

    @property
    def replicas(self) -> list[str]:
        """Replicas that finished shards, in the order of their shards."""
        return list(dict.fromkeys(shard.replica for shard in self.shards))

    @property
    def span_s(self) -> float | None:
        """Wall-clock seconds from the first request to the last completion; None if nothing was generated."""
        span = self.total.work_span
        return (span.end_unix_ns - span.begin_unix_ns) / NS_PER_S if span.end_unix_ns else None

    @property
    def clock_tokens_per_s(self) -> float | None:
        """Completion tokens per second of :attr:`span_s`, of all replicas together."""
        return self.total.num_completion_tokens / self.span_s if self.span_s else None


def read_run(path: Path, label: str, place: int = 0) -> ReportedRun:
    """Raises :class:`UserError` as :func:`specdist.results.runs.load_run` does, or if no shard is
    complete."""
    run, folder = load_run(path), RunFolder(path)
    if not run.finished_shards:
        raise UserError(
            f"{path} has no complete shard of its {run.num_shards} yet: wait for one "
            f"(python jobs/status.py {path} says how far it is)"
        )
    shards = read_finished(folder, run.finished_shards)
    # The policy's options are those in force, defaults included.
    policy = {name: run.manifest.fingerprint.get(name) for name in OPTION_NAMES}
    return ReportedRun(
        place=place,
        label=label,
        folder=folder,
        config={
            **options_of(folder.config_path),
            **{name: value for name, value in policy.items() if value is not None},
        },
        info=run.manifest.info,
        num_shards=run.num_shards,
        shards=shards,
        status=None if run.is_complete else StatusReader(path).read(),
        errors=read_error_rows(folder, [shard.shard for shard in shards if shard.stats.num_error_rows]),
        lengths=_completion_lengths(folder, run.finished_shards),
        trace=_read_trace(folder, run.finished_shards),
    )


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Raises :class:`UserError` as :func:`read_run` does."""
    return [
        read_run(path, label, place)
        for place, (path, label) in enumerate(zip(paths, labels_of(paths), strict=True))
    ]


def labels_of(paths: Iterable[Path]) -> list[str]:
    """The folders' names, with as many parent folders as distinguish them, or one for a single folder."""
    parts = [path.resolve().parts for path in paths]
    if len(parts) == 1:
        return ["/".join(parts[0][-2:])]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            break
    return labels


def read_error_rows(folder: RunFolder, shards: Sequence[int]) -> ErrorRows:
    """The error rows of the first of these shards."""
    rows: list[tuple[str, str, str]] = []
    kinds = Counter[str]()
    read = shards[:MAX_SHARDS_READ]
    for shard in read:
        table = read_columns(folder.data_path(shard), ERROR_COLUMNS)
        table = table.filter(pa.compute.is_valid(table["error"]))
        kinds.update(error_kind(reason) for reason in table["error"].to_pylist())
        for row in table.slice(0, MAX_ROWS_SHOWN - len(rows)).to_pylist():
            prompt = " ".join(str(row["prompt"] or "")[: 2 * MAX_PROMPT_CHARACTERS].split())
            is_cut = len(prompt) > MAX_PROMPT_CHARACTERS
            shown = prompt[:MAX_PROMPT_CHARACTERS] + "…" if is_cut else prompt
            rows.append((f"{row['row_id']}/{row['sample_index']}", row["error"], shown or NOTHING))
    return ErrorRows(rows, dict(kinds.most_common()), len(shards), len(read))


def _completion_lengths(folder: RunFolder, shards: Sequence[int]) -> np.ndarray:
    """The completions of all of these shards, or of evenly spread ones of them."""
    step = -(-len(shards) // MAX_SHARDS_READ)
    columns = ("finish_reason", "num_completion_tokens")
    table = pa.concat_tables(read_columns(folder.data_path(shard), columns) for shard in shards[::step])
    is_completion = pa.compute.not_equal(table["finish_reason"], "error")
    lengths: np.ndarray = table.filter(is_completion)["num_completion_tokens"].to_numpy()
    return lengths


def _read_trace(folder: RunFolder, shards: Sequence[int]) -> pa.Table | None:
    """Read the traces of all of these shards, or of evenly spread ones of them; None if there is none, or no
    verified token in any."""
    step = -(-len(shards) // MAX_SHARDS_READ)
    paths = map(folder.trace_path, shards[::step])
    tables = [read_columns(path, TRACE_COLUMNS) for path in paths if path.is_file()]
    verified = [table.filter(table["is_verified"]) for table in tables]
    return pa.concat_tables(verified) if sum(table.num_rows for table in verified) else None
