"""A run as a report shows it: manifest, options, progress, statistics and lengths of its completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from specdist.data.run.manifest import Manifest
from specdist.data.run.reading import read_columns
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.regression import NS_PER_S
from specdist.data.stats.shard import Stats
from specdist.job.totals.spending import options_of
from specdist.job.totals.status import RunStatus, StatusReader
from specdist.job.totals.totals import FinishedShard, Total, read_finished
from specdist.policies.registry import OPTION_NAMES
from specdist.results.runs import load_run
from specdist.utils.errors import UserError

MAX_SHARDS_READ = 50


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """A run as it is now.

    Attributes:
        place, label: its place among the runs of a report, and its name there.
        config: the resolved options with the policy's defaults; only these if ``config.yaml`` is missing.
        shards: the finished ones.
        lengths: [C] tokens of the completions of some shards, spread over the run.
    """

    place: int
    label: str
    path: Path
    config: Mapping[str, Any]
    manifest: Manifest
    shards: Sequence[FinishedShard]
    status: RunStatus
    lengths: np.ndarray

    @cached_property
    def total(self) -> Stats:
        """The sum of the finished shards' statistics."""
        return Total.of(self.shards).stats

    @property
    def is_exact(self) -> bool:
        return bool(self.manifest.info["exact"])

    @property
    def is_lossy(self) -> bool:
        """Tokens were committed unverified; of other runs that are not exact the target was not compared."""
        return self.config.get("policy") == "sprinter" and self.config.get("verify", "doubted") == "doubted"

    @property
    def num_devices(self) -> int:
        """Ranks of a replica; each has a GPU of its own if there are GPUs."""
        return int(self.manifest.info.get("world_size", 1))

    @property
    def has_drafts(self) -> bool:
        return self.total.num_drafts > 0

    @property
    def span_s(self) -> float | None:
        """Wall-clock seconds from the first request to the last completion; None if nothing was generated."""
        span = self.total.work_span
        return (span.end_unix_ns - span.begin_unix_ns) / NS_PER_S if span.end_unix_ns else None


def read_run(path: Path, label: str, place: int = 0) -> ReportedRun:
    """Raises :class:`UserError` as :func:`specdist.results.runs.load_run` does, or if no shard is
    complete."""
    run, folder = load_run(path), RunFolder(path)
    if not run.finished_shards:
        raise UserError(
            f"{path} has no complete shard of its {run.num_shards} yet: wait for one "
            f"(python jobs/status.py {path} says how far it is)"
        )
    # The policy's options are those in force, defaults included.
    policy = {name: run.manifest.fingerprint.get(name) for name in OPTION_NAMES}
    return ReportedRun(
        place=place,
        label=label,
        path=path,
        config={
            **options_of(folder.config_path),
            **{name: value for name, value in policy.items() if value is not None},
        },
        manifest=run.manifest,
        shards=read_finished(folder, run.finished_shards),
        status=StatusReader(path).read(),
        lengths=_completion_lengths(folder, run.finished_shards),
    )


def labels_of(paths: Iterable[Path]) -> list[str]:
    """The folders' names, with as many parent folders as distinguish them, or one for a single folder."""
    parts = [path.resolve().parts for path in paths]
    lengths = range(1, max(map(len, parts)) + 1) if len(parts) > 1 else [2]
    shortened = (["/".join(part[-length:]) for part in parts] for length in lengths)
    return next(labels for labels in shortened if len(set(labels)) == len(labels))


def _completion_lengths(folder: RunFolder, shards: Sequence[int]) -> np.ndarray:
    """The completions of all of these shards, or of evenly spread ones of them."""
    step = -(-len(shards) // MAX_SHARDS_READ)
    columns = ("finish_reason", "num_completion_tokens")
    table = pa.concat_tables(read_columns(folder.data_path(shard), columns) for shard in shards[::step])
    is_completion = pa.compute.not_equal(table["finish_reason"], "error")
    lengths: np.ndarray = table.filter(is_completion)["num_completion_tokens"].to_numpy()
    return lengths
