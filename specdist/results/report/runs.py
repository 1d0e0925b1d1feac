"""A run as a report shows it: manifest, options, statistics, errors and trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from specdist.data.run.reading import read_columns
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.regression import NS_PER_S
from specdist.data.stats.shard import Stats
from specdist.job.totals.predictions import Predictions
from specdist.job.totals.report import run_predictions
from specdist.job.totals.spending import options_of
from specdist.job.totals.status import RunStatus, StatusReader, error_kind
from specdist.job.totals.totals import Total, read_finished
from specdist.policies.registry import OPTION_NAMES
from specdist.results.report.formats import NOTHING
from specdist.results.report.panels.traces import TracedTokens, read_traced_tokens
from specdist.results.report.shard_figures import ShardFigures
from specdist.results.runs import load_run
from specdist.utils.errors import UserError

ERROR_COLUMNS = ("row_id", "sample_index", "prompt", "error")
MAX_SHARDS_READ = 50
MAX_ROWS_SHOWN = 20
MAX_PROMPT_CHARACTERS = 80


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
        label: its name among other runs.
        config: the resolved options with the policy's defaults; only these if ``config.yaml`` is missing.
        shards: figures of the complete shards; ``total`` is the sum of their statistics.
        status: progress; None for a complete run.
        trace: of the drafted tokens; None without ``--trace``.
    """

    label: str
    folder: RunFolder
    config: Mapping[str, Any]
    info: Mapping[str, Any]
    num_shards: int
    shards: ShardFigures
    total: Stats
    status: RunStatus | None
    errors: ErrorRows
    trace: TracedTokens | None

    @property
    def is_exact(self) -> bool:
        return bool(self.info["exact"])

    @property
    def num_devices(self) -> int:
        """Ranks of a replica; each has a GPU of its own if there are GPUs."""
        return int(self.info.get("world_size", 1))

    @property
    def num_target_devices(self) -> int:
        """Those of the target alone. A draft of its own has one more."""
        return self.num_devices - (self.info.get("draft_placement") == "own")

    @property
    def ranks(self) -> str:
        """Their number, and which of them holds the draft."""
        holder = {"own": " (one for the draft)", "shared": " (the first has the draft, too)"}
        return f"{self.num_devices}{holder.get(self.info.get('draft_placement') or '', '')}"

    @property
    def device_name(self) -> str:
        return "GPU" if self.info.get("device") == "cuda" else "rank"

    @property
    def has_drafts(self) -> bool:
        return self.total.num_drafts > 0

    @property
    def num_replicas(self) -> int:
        """Replicas that finished shards; 1 if unknown."""
        return len(self.shards.replicas)

    @property
    def is_colocated(self) -> bool:
        """The draft is in the process of the target's rank 0, so that it was sent no message."""
        return self.total.num_messages == 0

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        return self.total.summary(self.num_devices)

    @cached_property
    def predictions(self) -> Predictions:
        return run_predictions(self.folder, self.total)

    @property
    def span_s(self) -> float | None:
        """Wall-clock seconds from the first request to the last completion; None if unknown."""
        span = self.total.work_span
        return (span.end_unix_ns - span.begin_unix_ns) / NS_PER_S if span.end_unix_ns else None


def read_run(path: Path, label: str) -> ReportedRun:
    """Raises :class:`UserError` as :func:`specdist.results.runs.load_run` does, or if no shard is
    complete."""
    run, folder = load_run(path), RunFolder(path)
    if not run.finished_shards:
        raise UserError(
            f"{path} has no complete shard of its {run.num_shards} yet: wait for one "
            f"(python jobs/status.py {path} says how far it is)"
        )
    shards = read_finished(folder, run.finished_shards)
    total = Total.of(shards)
    # With the policy's options in force, defaults included.
    policy = {name: run.manifest.fingerprint.get(name) for name in OPTION_NAMES}
    return ReportedRun(
        label=label,
        folder=folder,
        config={
            **options_of(folder.config_path),
            **{name: value for name, value in policy.items() if value is not None},
        },
        info=run.manifest.info,
        num_shards=run.num_shards,
        shards=ShardFigures.of(shards),
        total=total.stats,
        status=None if run.is_complete else StatusReader(path).read(),
        errors=read_error_rows(folder, sorted(total.error_shards)),
        trace=read_traced_tokens(folder, run.finished_shards),
    )


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Raises :class:`UserError` as :func:`read_run` does."""
    return [read_run(path, label) for path, label in zip(paths, labels_of(paths), strict=True)]


def tokens_per_pass(stats: Stats) -> float | None:
    """Tokens that a sequence gets per target pass; None without one."""
    steps = stats.num_row_steps
    return (steps + stats.num_accepted_tokens) / steps if steps else None


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
        table = _failed(folder.data_path(shard))
        kinds.update(error_kind(reason) for reason in table["error"].to_pylist())
        for row in table.slice(0, MAX_ROWS_SHOWN - len(rows)).to_pylist():
            prompt = " ".join(str(row["prompt"] or "")[: 2 * MAX_PROMPT_CHARACTERS].split())
            is_cut = len(prompt) > MAX_PROMPT_CHARACTERS
            shown = prompt[:MAX_PROMPT_CHARACTERS] + "…" if is_cut else prompt
            rows.append((f"{row['row_id']}/{row['sample_index']}", row["error"], shown or NOTHING))
    return ErrorRows(rows, dict(kinds.most_common()), len(shards), len(read))


def _failed(path: Path) -> pa.Table:
    table = read_columns(path, ERROR_COLUMNS)
    return table.filter(pa.compute.is_valid(table["error"]))
