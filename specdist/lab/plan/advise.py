"""The best plan of every mode (ranks, batch size, draft length), and the one to take.

A site's GPUs are filled with replicas, each on one node. A draft on the target's rank 0 takes memory. With a
GPU of its own and ``--overlap auto`` a replica is as fast as one without a draft, or faster, but takes one
GPU more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

from specdist.config.groups import ExpertParallel
from specdist.lab.plan.hardware import Gpu
from specdist.lab.plan.memory import Fit, fit
from specdist.lab.plan.roofline import DEFAULTS, DRAFT_PASS, TARGET_PASS, Placement, roofline_costs
from specdist.lab.plan.simulate import (
    MODES,
    OWN_GPU,
    PREFILL_CHUNK_TOKENS,
    Mode,
    Prediction,
    ReplicaCosts,
    Settings,
    predict,
)
from specdist.models.sizes.sizes import ModelSize
from specdist.sampling.distributions import SamplingSettings

MAX_DRAFT_TOKENS = 16
# A smaller speed-up is within the error of the model, so the simpler plan is chosen.
WORTHWHILE = 1.05
S_PER_HOUR = 3600
# At which it is counted how ranks share experts best.
TYPICAL_BATCH = 64
# Of a node, where it is asked how many are needed.
MOST_GPUS = 8
# Of the host, for an n-gram lookup in a batch, and for each token of it: 0.5 ms for 64 sequences of 1,000
# tokens and 2.5 ms for 64 of 8,000 were measured on a CPU (jobs/guides/drafts.md).
LOOKUP_S, LOOKUP_TOKEN_S = 0.2e-3, 4.5e-9


@dataclass(frozen=True)
class Site:
    """The hardware: nodes of equal GPUs; ``dtype``: of the target's numbers there."""

    gpu: Gpu
    gpus_per_node: int
    num_nodes: int
    max_num_seqs: int | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Work:
    """Lengths are those of every row, in tokens; ``caught`` is the share of misses that branches catch;
    ``sampling``: how tokens are drawn; ``expert_parallel``: how ranks share experts; ``uses_ngrams``: drafts
    are looked up in a sequence's own tokens."""

    prompt_tokens: int
    output_tokens: int
    num_prompts: int
    acceptance: float
    caught: float
    sampling: SamplingSettings = DEFAULTS
    expert_parallel: ExpertParallel = "auto"
    uses_ngrams: bool = False

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_context_tokens(self) -> float:
        """Mean length of a sequence while its completion grows."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One mode with its settings, and the prediction for them.

    Attributes:
        num_replicas: side by side.
        prediction: of one replica.
        has_whole_experts: each is on one of several ranks.
        tokens_per_s: of all replicas; ``tokens_per_s_per_gpu`` counts the GPUs that they use.
        num_paid: all GPUs of the nodes in use.
    """

    settings: Settings
    tp_size: int
    num_replicas: int
    fit: Fit
    prediction: Prediction
    work: Work
    num_paid: int
    has_whole_experts: bool = False

    @property
    def num_gpus(self) -> int:
        """The GPUs of one replica, which has as many processes."""
        return self.tp_size + (self.settings.mode in OWN_GPU)

    @property
    def tokens_per_s(self) -> float:
        return self.prediction.tokens_per_s * self.num_replicas

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.prediction.tokens_per_s / self.num_gpus

    @property
    def hours(self) -> float:
        return self.work.num_prompts * self.work.output_tokens / self.tokens_per_s / S_PER_HOUR


class Planner:
    """Searches plans for a pair of models (or a target alone) on a site."""

    def __init__(self, target: ModelSize, draft: ModelSize | None, site: Site, work: Work) -> None:
        self.target, self.draft, self.site, self.work = target, draft, site, work
        self.modes: tuple[Mode, ...] = ("target only", "n-grams") if work.uses_ngrams else ("target only",)
        if draft is not None:
            # A drafter of states takes turns with its target.
            self.modes = MODES[:3] if draft.num_read_numbers else MODES
        self._longest = min(MAX_DRAFT_TOKENS, (draft and draft.num_block_tokens) or MAX_DRAFT_TOKENS)
        self._costs = cache(self._measure)
        self._fit = cache(self._measure_fit)
        self.by_ranks = cache(self._best_by_ranks)

    def best_plans(self) -> list[Plan]:
        """The plan with the most tokens per second on the whole site, for each mode that fits."""
        return [plan for plan in map(self.best, self.modes) if plan is not None]

    def best(self, mode: Mode) -> Plan | None:
        """The plan of a mode with the most tokens per second on the whole site; None if it does not fit."""
        return max(self.by_ranks(mode), key=lambda plan: plan.tokens_per_s, default=None)

    def _best_by_ranks(self, mode: Mode) -> list[Plan]:
        """The best plan of a mode for each number of ranks: replicas of few, or fewer of more."""
        groups = groupby(self._plans(mode), key=lambda plan: plan.tp_size)
        return [max(plans, key=lambda plan: plan.tokens_per_s) for _, plans in groups]

    def fits(self) -> list[tuple[Mode, int, Fit]]:
        """The memory of every mode and number of ranks, whether it fits or not; of those with a draft's own
        GPU once."""
        left_out = ("synchronous", "branches") if "branches" in self.modes else ()
        return [
            (mode, tp_size, self._fit(mode, tp_size, 1))
            for mode in self.modes
            if mode not in left_out
            for tp_size in self._tp_sizes(mode, self.site.gpus_per_node)
        ]

    def why_missing(self, mode: Mode) -> str:
        """Why no replica of a mode is on a node: how many GPUs one needs."""
        most = max(MOST_GPUS, self.site.gpus_per_node)
        fitting = [size for size in self._tp_sizes(mode, most) if self._fit(mode, size, 1).most_rows]
        return f"needs {fitting[0] + (mode in OWN_GPU)} GPUs" if fitting else f"does not fit {most} GPUs"

    def _tp_sizes(self, mode: Mode, num_gpus: int) -> list[int]:
        most = num_gpus - (mode in OWN_GPU)
        return [size for size in self.target.tp_sizes(most) if self._on_ranks(size) is not None]

    def _on_ranks(self, tp_size: int) -> ModelSize | None:
        """The target with its experts as so many ranks share them; None where they cannot."""
        block = 1 if self.draft is None else MAX_DRAFT_TOKENS + 1
        num_tokens = (self.site.max_num_seqs or TYPICAL_BATCH) * block
        return self.target.with_experts_for(tp_size, num_tokens, self.work.expert_parallel)

    def _measure_fit(self, mode: Mode, tp_size: int, num_draft_tokens: int) -> Fit:
        target = self._on_ranks(tp_size)
        assert target is not None
        return fit(
            target, self.draft, self.site.gpu, mode, tp_size=tp_size, row_tokens=self.work.row_tokens,
            num_draft_tokens=num_draft_tokens, settings=self.work.sampling,
            num_branches=self._settings(mode, 1, num_draft_tokens).num_branches,
        )  # fmt: skip

    def _plans(self, mode: Mode) -> Iterator[Plan]:
        lengths = [0] if mode == "target only" else range(1, self._longest + 1)
        per_node = self.site.gpus_per_node
        for tp_size in self._tp_sizes(mode, per_node):
            target = self._on_ranks(tp_size)
            assert target is not None
            on_node = per_node // (tp_size + (mode in OWN_GPU))
            # Fewer prompts than replicas leave some without work.
            num_replicas = min(on_node * self.site.num_nodes, self.work.num_prompts)
            for length in lengths:
                room = self._fit(mode, tp_size, length)
                most = min(room.most_rows, -(-self.work.num_prompts // num_replicas))
                for num_rows in _batch_sizes(min(most, self.site.max_num_seqs or most)):
                    yield Plan(
                        settings=self._settings(mode, num_rows, length),
                        tp_size=tp_size,
                        num_replicas=num_replicas,
                        fit=room,
                        prediction=self._predict(mode, tp_size, num_rows, length),
                        work=self.work,
                        num_paid=-(-num_replicas // on_node) * per_node,
                        has_whole_experts=tp_size > 1 and target.has_whole_experts,
                    )

    def _predict(self, mode: Mode, tp_size: int, num_rows: int, num_draft_tokens: int) -> Prediction:
        costs, settings = self._costs(tp_size, num_rows), self._settings(mode, num_rows, num_draft_tokens)
        work = self.work
        return predict(costs, settings, prompt_tokens=work.prompt_tokens, output_tokens=work.output_tokens)

    def _settings(self, mode: Mode, num_rows: int, num_draft_tokens: int) -> Settings:
        return Settings(
            mode=mode,
            num_rows=num_rows,
            num_draft_tokens=num_draft_tokens,
            acceptance=self.work.acceptance,
            caught=self.work.caught,
        )

    def _measure(self, tp_size: int, num_rows: int) -> ReplicaCosts:
        target, draft = (
            None
            if model is None
            else Placement(
                model=model,
                gpu=self.site.gpu,
                tp_size=ranks,
                context_tokens=self.work.mean_context_tokens,
                prompt_tokens=self.work.prompt_tokens,
                counts=counts,
                sampling=self.work.sampling,
                drafts=counts is DRAFT_PASS,
            )
            for model, ranks, counts in (
                (self._on_ranks(tp_size), tp_size, TARGET_PASS),
                (self.draft, 1, DRAFT_PASS),
            )
        )
        assert target is not None
        branches = self._settings("branches", num_rows, 1)
        costs = roofline_costs(
            target,
            draft,
            num_rows=num_rows,
            most_tokens=num_rows * (MAX_DRAFT_TOKENS + 1) + PREFILL_CHUNK_TOKENS,
            most_draft_rows=num_rows * max(2, 1 + branches.num_branches),
        )
        lookup_s = LOOKUP_S + LOOKUP_TOKEN_S * num_rows * self.work.mean_context_tokens
        return replace(costs, proposal_s=lookup_s) if self.work.uses_ngrams else costs


def _batch_sizes(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and the most that fits."""
    size = 1
    while size < most:
        yield size
        size = size + max(1, size // 2 if size & (size - 1) == 0 else size // 3)
    if most > 0:
        yield most


def recommend(plans: Sequence[Plan]) -> Plan | None:
    """The plan with the most tokens per second; a later mode, which is less simple, must be clearly faster.
    None without any plan."""
    chosen: Plan | None = None
    for plan in plans:
        if chosen is None or plan.tokens_per_s > WORTHWHILE * chosen.tokens_per_s:
            chosen = plan
    return chosen
