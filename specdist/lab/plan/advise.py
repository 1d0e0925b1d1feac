"""The best plan of every mode (ranks, batch size, draft length), and the one to take.

A site's GPUs are filled with replicas, each on one node. A draft on the target's rank 0 takes memory. With a
GPU of its own and ``--overlap auto`` a replica is as fast as one without a draft, or faster, but takes one
GPU more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

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


@dataclass(frozen=True, kw_only=True)
class Site:
    """The hardware: nodes of equal GPUs."""

    gpu: Gpu
    gpus_per_node: int
    num_nodes: int
    max_num_seqs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """Lengths are those of every row, in tokens; ``caught`` is the share of misses that branches catch;
    ``sampling``: how tokens are drawn; ``expert_parallel``: how ranks share experts."""

    prompt_tokens: int
    output_tokens: int
    num_prompts: int
    acceptance: float
    caught: float
    sampling: SamplingSettings = DEFAULTS
    expert_parallel: ExpertParallel = "auto"

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
        most_rows: sequences that memory has room for; ``settings.num_rows`` are used.
        prediction: of one replica.
        has_whole_experts: each is on one of several ranks.
        tokens_per_s: of all replicas; ``tokens_per_s_per_gpu`` counts the GPUs that they use.
    """

    settings: Settings
    tp_size: int
    num_replicas: int
    most_rows: int
    fit: Fit
    prediction: Prediction
    num_prompts: int
    output_tokens: int
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
        return self.num_prompts * self.output_tokens / self.tokens_per_s / S_PER_HOUR


class Planner:
    """Searches plans for a pair of models (or a target alone) on a site."""

    def __init__(self, target: ModelSize, draft: ModelSize | None, site: Site, work: Work) -> None:
        self._target = target
        self._draft = draft
        self._site = site
        self._work = work
        # A drafter of states takes turns with its target.
        self._reads_states = draft is not None and draft.num_read_numbers > 0
        self._longest = min(MAX_DRAFT_TOKENS, (draft and draft.num_block_tokens) or MAX_DRAFT_TOKENS)
        self._costs = cache(self._measure)
        self._fit = cache(self._measure_fit)

    def best_plans(self) -> list[Plan]:
        """The plan with the most tokens per second on the whole site, for each mode that fits, in the order
        of :data:`MODES`."""
        best = [max(self._plans(mode), key=lambda plan: plan.tokens_per_s, default=None) for mode in MODES]
        return [plan for plan in best if plan is not None]

    def fits(self) -> list[tuple[Mode, int, Fit]]:
        """The memory of every mode and number of ranks, whether it fits or not."""
        return [
            (mode, tp_size, self._fit(mode, tp_size, 1))
            for mode in MODES
            if mode not in ("synchronous" if not self._reads_states else "asynchronous", "branches")
            for tp_size in self._tp_sizes(mode)
        ]

    def _tp_sizes(self, mode: Mode) -> list[int]:
        if mode != "target only" and self._draft is None:
            return []
        if self._reads_states and mode in ("asynchronous", "branches"):
            return []
        most = self._site.gpus_per_node - (mode in OWN_GPU)
        return [size for size in self._target.tp_sizes(most) if self._on_ranks(size) is not None]

    def _on_ranks(self, tp_size: int) -> ModelSize | None:
        """The target with its experts as so many ranks share them; None where they cannot."""
        block = 1 if self._draft is None else MAX_DRAFT_TOKENS + 1
        num_tokens = (self._site.max_num_seqs or TYPICAL_BATCH) * block
        return self._target.with_experts_for(tp_size, num_tokens, self._work.expert_parallel)

    def _measure_fit(self, mode: Mode, tp_size: int, num_draft_tokens: int) -> Fit:
        target = self._on_ranks(tp_size)
        assert target is not None
        return fit(
            target,
            self._draft,
            self._site.gpu,
            mode,
            tp_size=tp_size,
            row_tokens=self._work.row_tokens,
            num_draft_tokens=num_draft_tokens,
            num_branches=self._settings(mode, 1, num_draft_tokens).num_branches,
            settings=self._work.sampling,
        )

    def _plans(self, mode: Mode) -> Iterator[Plan]:
        lengths = [0] if mode == "target only" else range(1, self._longest + 1)
        for tp_size in self._tp_sizes(mode):
            target = self._on_ranks(tp_size)
            assert target is not None
            num_replicas = self._site.gpus_per_node // (tp_size + (mode in OWN_GPU)) * self._site.num_nodes
            # Fewer prompts than replicas leave some without work.
            num_replicas = min(num_replicas, self._work.num_prompts)
            for length in lengths if num_replicas else ():
                room = self._fit(mode, tp_size, length)
                most = min(room.most_rows, -(-self._work.num_prompts // num_replicas))
                for num_rows in _batch_sizes(min(most, self._site.max_num_seqs or most)):
                    yield Plan(
                        settings=self._settings(mode, num_rows, length),
                        tp_size=tp_size,
                        num_replicas=num_replicas,
                        most_rows=room.most_rows,
                        fit=room,
                        prediction=self._predict(mode, tp_size, num_rows, length),
                        num_prompts=self._work.num_prompts,
                        output_tokens=self._work.output_tokens,
                        has_whole_experts=tp_size > 1 and target.has_whole_experts,
                    )

    def _predict(self, mode: Mode, tp_size: int, num_rows: int, num_draft_tokens: int) -> Prediction:
        return predict(
            self._costs(tp_size, num_rows),
            self._settings(mode, num_rows, num_draft_tokens),
            prompt_tokens=self._work.prompt_tokens,
            output_tokens=self._work.output_tokens,
        )

    def _settings(self, mode: Mode, num_rows: int, num_draft_tokens: int) -> Settings:
        return Settings(
            mode=mode,
            num_rows=num_rows,
            num_draft_tokens=num_draft_tokens,
            acceptance=self._work.acceptance,
            caught=self._work.caught,
        )

    def _measure(self, tp_size: int, num_rows: int) -> ReplicaCosts:
        target, draft = (
            None
            if model is None
            else Placement(
                model=model,
                gpu=self._site.gpu,
                tp_size=ranks,
                context_tokens=self._work.mean_context_tokens,
                prompt_tokens=self._work.prompt_tokens,
                counts=counts,
                sampling=self._work.sampling,
                drafts=counts is DRAFT_PASS,
            )
            for model, ranks, counts in (
                (self._on_ranks(tp_size), tp_size, TARGET_PASS),
                (self._draft, 1, DRAFT_PASS),
            )
        )
        assert target is not None
        branches = self._settings("branches", num_rows, 1)
        return roofline_costs(
            target,
            draft,
            num_rows=num_rows,
            most_tokens=num_rows * (MAX_DRAFT_TOKENS + 1) + PREFILL_CHUNK_TOKENS,
            most_draft_rows=num_rows * max(2, 1 + branches.num_branches),
        )


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
