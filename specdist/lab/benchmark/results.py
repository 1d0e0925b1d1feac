"""The result of a benchmark: every repeat, what was compared, and where; one JSON document.

Tables are made from it, so it holds all that a reader needs to verify or repeat a number.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdist.data.store.files import write_json
from specdist.lab.benchmark.methods import Row
from specdist.lab.synthetic.build import SyntheticRecord
from specdist.utils.packages import version_of

LIBRARIES = ("specdist", "torch", "transformers")
KIND = "specdist benchmark"
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Where it was measured. ``num_cores`` are those that this process may use."""

    cpu: str
    num_cores: int
    num_threads: int
    gpu: str | None

    @staticmethod
    def of_this_process(device: torch.device) -> Hardware:
        affinity = getattr(os, "sched_getaffinity", None)
        return Hardware(
            cpu=_cpu_model(),
            num_cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
            num_threads=torch.get_num_threads(),
            gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        )


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Names as given (the shape of a synthetic pair), numbers of parameters, and the type of the weights."""

    target: str
    draft: str
    num_target_parameters: int
    num_draft_parameters: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class WorkSize:
    """Lengths of prompts, and limits of completions, in tokens."""

    num_rows: int
    shortest_prompt: int
    longest_prompt: int
    shortest_limit: int
    longest_limit: int

    @staticmethod
    def of(rows: Sequence[Row]) -> WorkSize:
        prompts, limits = [len(row.prompt_ids) for row in rows], [row.max_new_tokens for row in rows]
        return WorkSize(
            num_rows=len(rows),
            shortest_prompt=min(prompts),
            longest_prompt=max(prompts),
            shortest_limit=min(limits),
            longest_limit=max(limits),
        )


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One method at one batch size. Lists have an entry per repeat, and tokens are those that a user keeps.

    Attributes:
        tokens_per_s: the median.
        ratio_to_assisted, ratio_to_generate: tokens/s over those of transformers' assisted generation (batch
            1 only) and of its ``generate`` at the same batch size; None where not measured.
        ratio_to_target_only: over specdist's target alone at the same batch size.
        ratio_to_peer: over the fastest method of another engine at the same batch size.
        default_ratio: tokens/s of specdist's default policy at the same batch size over these.
        num_rows_differing: rows whose tokens are not those of transformers' ``generate`` at the smallest
            batch size, or of the target alone where that was not measured; None where they may differ. In
            float32 only near-ties may differ.
        statistics: specdist's summary of the last repeat: acceptance, passes, shares of the time.
    """

    name: str
    batch_size: int
    seconds: list[float]
    num_tokens: list[int]
    tokens_per_s: float
    ratio_to_assisted: float | None = None
    ratio_to_generate: float | None = None
    ratio_to_target_only: float | None = None
    ratio_to_peer: float | None = None
    default_ratio: float | None = None
    num_rows_differing: int | None = None
    statistics: dict[str, Any] | None = None

    def statistic(self, name: str) -> float | None:
        return (self.statistics or {}).get(name)


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What was measured, where and when: enough to verify or repeat it. ``synthetic`` is the record of a
    random pair, None for trained models."""

    command: str
    date: str
    hardware: Hardware
    versions: dict[str, str | None]
    settings: dict[str, Any]
    synthetic: SyntheticRecord | None
    models: ModelSizes
    work: WorkSize

    def write(self, path: Path) -> None:
        """Write the JSON document, atomically."""
        write_json(path, dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult(Circumstances):
    """``costs``: what policies were told of passes, by batch size; see ``CostModel.to_json``."""

    methods: Sequence[MethodResult]
    costs: dict[str, Any] = field(default_factory=dict)
    peer_versions: dict[str, str] = field(default_factory=dict)
    kind: str = field(default=KIND)

    @property
    def most_rows_differing(self) -> int | None:
        """Of any method; None where all may differ."""
        counts = [method.num_rows_differing for method in self.methods]
        return max((count for count in counts if count is not None), default=None)


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: version_of(name) for name in LIBRARIES}}


def _cpu_model() -> str:
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
