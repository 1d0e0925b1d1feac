"""The result of a benchmark: every repeat, what was compared, and where; one JSON document.

Tables are made from the file, so it holds all that a reader needs to verify or repeat a number.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdist.data.store.files import write_json
from specdist.lab.benchmark.sides.overhead import FeatureOverhead, HeadOverhead, PassOverhead, PolicyOverhead
from specdist.lab.synthetic.build import SyntheticRecord
from specdist.utils.errors import UserError
from specdist.utils.json_values import from_fields
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


@dataclass(frozen=True, kw_only=True)
class OverlapResult:
    """One way of running the draft, by the statistics of the last repeat; None where nothing was counted.

    Attributes:
        ratio_to_separate: tokens/s over those of the draft on a rank of its own that takes turns with the
            target, at the same batch size.
        num_branches: prepared per row while the target verifies.
        tokens_per_row_pass: tokens that a row gets from a target pass, with or without candidates.
        acceptance: probability that a verified token is accepted, candidates and first tokens ahead alike.
        ready_share: share of row-rounds that found candidates ready.
        predicted_ready_share: by :func:`specdist.policies.formulas.ready_share`, for this acceptance and the
            measured share of misses caught. It assumes endless rows; here a row begins without candidates,
            and near its end there is nothing to draft. None where nothing is drafted ahead.
        num_hits_per_rank: next tokens that a branch had prepared for, by the rank of the branch's first token
            among the alternatives.
        miss_catch_rate: their share of all next tokens that ended a draft.
        target_idle_share, draft_idle_share: share of each side's time spent waiting for the other.
    """

    ratio_to_separate: float | None
    num_branches: int
    tokens_per_row_pass: float | None
    acceptance: float | None
    ready_share: float | None
    predicted_ready_share: float | None
    num_hits_per_rank: list[int]
    miss_catch_rate: float | None
    target_idle_share: float | None
    draft_idle_share: float | None


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """The policy and placement of a method of specdist with a draft.

    Attributes:
        family: the policy and its options without the lengths.
        first_length: tokens of a row's first block if an option says it; of ``fixed``, of every block.
        placement: ``colocated``, ``separate`` (in turns with the target) or ``ahead``.
        num_branches: prepared per row while the target verifies.
    """

    family: str
    first_length: int | None
    placement: str
    num_branches: int


@dataclass(frozen=True, kw_only=True)
class SpreadResult:
    """How much a policy depends on its first length (Gautam et al. 2025, Table 2), in one placement at one
    batch size.

    Attributes:
        first_lengths, ratios: draft tokens of the first round, and tokens/s over the target alone with each.
        mean, deviation, range: of the ratios. The deviation is that of a whole population; the range is the
            largest less the smallest.
        mean_to_fixed, deviation_to_fixed: in units of the mean of fixed-length decoding over the same
            lengths, as in the paper; None where that was not measured.
    """

    family: str
    placement: str
    batch_size: int
    first_lengths: list[int]
    ratios: list[float]
    mean: float
    deviation: float
    range: float
    mean_to_fixed: float | None
    deviation_to_fixed: float | None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Lists have an entry per repeat, and tokens are those that a user keeps; ``tokens_per_s`` is the median.

    ``ratio_to_target_only``: over specdist's target alone, in its process, at the same batch size.
    """

    seconds: list[float]
    num_tokens: list[int]
    tokens_per_s: float
    ratio_to_target_only: float | None = None


@dataclass(frozen=True, kw_only=True)
class GroupResult(Timing):
    """One method on the rows of one group, which are timed separately."""

    name: str
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class MethodResult(Timing):
    """One method at one batch size.

    Attributes:
        ratio_to_assisted, ratio_to_generate: tokens/s over those of transformers' assisted generation (batch
            1 only) and of its ``generate`` at the same batch size; None where not measured.
        decoding_ratio_to_target_only: as ``ratio_to_target_only``, without the prompts' passes.
        num_rows_differing: rows whose tokens are not those of transformers' ``generate`` at the smallest
            batch size, or of the target alone where that was not measured; None where they may differ. In
            float32 only near-ties may differ.
        statistics: specdist's summary of the last repeat: acceptance, passes, shares of the time.
        overlap: of specdist with a draft, at batch sizes where the draft was on a rank of its own too.
        policy: of specdist with a draft.
        ratio_to_peer: tokens/s over those of the fastest method of another engine at the same batch size.
        groups: where there is more than one.
    """

    name: str
    batch_size: int
    ratio_to_assisted: float | None
    ratio_to_generate: float | None
    num_rows_differing: int | None
    statistics: dict[str, Any] | None
    overlap: OverlapResult | None = None
    decoding_ratio_to_target_only: float | None = None
    policy: PolicyResult | None = None
    ratio_to_peer: float | None = None
    groups: list[GroupResult] = field(default_factory=list)


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


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult(Circumstances):
    """``costs``, by placement and batch size, are those that policies used: nanoseconds of target passes by
    tokens, and of draft steps by rows."""

    methods: list[MethodResult]
    overhead: list[PassOverhead] = field(default_factory=list)
    costs: dict[str, Any] = field(default_factory=dict)
    spreads: list[SpreadResult] = field(default_factory=list)
    policy_overhead: list[PolicyOverhead] = field(default_factory=list)
    feature_overhead: list[FeatureOverhead] = field(default_factory=list)
    head_overhead: list[HeadOverhead] = field(default_factory=list)
    peer_versions: dict[str, str] = field(default_factory=dict)
    kind: str = field(default=KIND)

    @property
    def is_of_policies(self) -> bool:
        """Whether length policies were compared, or specdist with transformers."""
        return self.settings.get("policies") is not None

    @property
    def most_rows_differing(self) -> int | None:
        """Of any method; None where all may differ."""
        counts = [method.num_rows_differing for method in self.methods]
        return max((count for count in counts if count is not None), default=None)

    def write(self, path: Path) -> None:
        """Write the JSON document, atomically."""
        write_json(path, dataclasses.asdict(self))

    @staticmethod
    def read(path: Path) -> BenchmarkResult:
        """Raises :class:`UserError` for a file that is not a result."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"--results {path} cannot be read: {error}") from error
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise UserError(f"--results {path} is not a result of jobs/benchmark.py")
        try:
            return from_fields(BenchmarkResult, values, drops_unknown=True)
        except ValueError as error:
            raise UserError(
                f"--results {path} was written by a different version ({error}): measure again"
            ) from error


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: version_of(name) for name in LIBRARIES}}


def _cpu_model() -> str:
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
