"""What a comparison finds beyond :mod:`specdist.lab.benchmark.results`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from specdist.lab.benchmark.results import KIND, BenchmarkResult, MethodResult
from specdist.utils.errors import UserError
from specdist.utils.json_values import from_fields
from tests.lab.benchmark.overhead import FeatureOverhead, HeadOverhead, PassOverhead, PolicyOverhead


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
        placement: ``colocated``, ``separate`` (synchronous) or ``asynchronous``.
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
class GroupResult:
    """One method on the rows of one group, as a :class:`MethodResult`."""

    name: str
    num_rows: int
    seconds: list[float]
    num_tokens: list[int]
    tokens_per_s: float
    ratio_to_target_only: float | None = None


@dataclass(frozen=True, kw_only=True)
class ComparedMethod(MethodResult):
    """``overlap``: of specdist with a draft, at batch sizes where the draft was on a rank of its own too;
    ``decoding_ratio_to_target_only``: without the prompts' passes; ``policy``: of specdist with a draft;
    ``groups``: where there is more than one."""

    overlap: OverlapResult | None = None
    decoding_ratio_to_target_only: float | None = None
    policy: PolicyResult | None = None
    groups: list[GroupResult] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ComparisonResult(BenchmarkResult):
    """``spreads`` and the overheads are empty where there was nothing to measure."""

    methods: list[ComparedMethod]
    overhead: list[PassOverhead] = field(default_factory=list)
    spreads: list[SpreadResult] = field(default_factory=list)
    policy_overhead: list[PolicyOverhead] = field(default_factory=list)
    feature_overhead: list[FeatureOverhead] = field(default_factory=list)
    head_overhead: list[HeadOverhead] = field(default_factory=list)

    @property
    def is_of_policies(self) -> bool:
        """Whether length policies were compared, or specdist with other engines."""
        return self.settings.get("policies") is not None

    @staticmethod
    def read(path: Path) -> ComparisonResult:
        """Of ``jobs/benchmark.py``, too. Raises :class:`UserError` for a file that is not such a result."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise UserError(f"{path} is not a result of jobs/benchmark.py")
        try:
            return from_fields(ComparisonResult, values, drops_unknown=True)
        except ValueError as error:
            raise UserError(f"{path} was written by a different version ({error}): measure again") from error
