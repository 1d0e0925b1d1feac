"""The best plan of every mode (ranks, batch size and draft length), and the one to recommend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from specdist.models.sizes import ModelSize
from specdist.planning.counted import DRAFT_PASS, TARGET_PASS
from specdist.planning.hardware import Gpu
from specdist.planning.memory import Fit, fit
from specdist.planning.roofline import Placement, roofline_costs
from specdist.planning.simulate import (
    MODES,
    PREFILL_CHUNK_TOKENS,
    Mode,
    Prediction,
    ReplicaCosts,
    Settings,
    predict,
)

MAX_DRAFT_TOKENS = 16
# A smaller speed-up is within the error of the model, so the simpler plan is chosen.
WORTHWHILE = 1.05
S_PER_HOUR = 3600
OWN_GPU: tuple[Mode, ...] = ("in turns", "ahead", "branches")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Lengths are those of every row, in tokens; ``caught`` is the share of misses that branches catch."""

    prompt_tokens: int
    output_tokens: int
    num_prompts: int
    acceptance: float
    caught: float

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_context_tokens(self) -> float:
        """Mean length of a sequence while its completion grows."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, kw_only=True)
class Site:
    """The hardware. A replica does not cross nodes."""

    gpu: Gpu
    gpus_per_node: int
    num_nodes: int
    max_num_seqs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One mode with its settings, and the prediction for them.

    Attributes:
        num_gpus: of one replica; ``num_replicas`` run side by side.
        most_rows: sequences that memory has room for; ``settings.num_rows`` are used.
        tokens_per_s: of all replicas; ``tokens_per_s_per_gpu`` counts the GPUs that they use.
        is_runnable: by ``jobs/generate.py``, which holds both models in one process on one GPU only.
    """

    settings: Settings
    tp_size: int
    num_gpus: int
    num_replicas: int
    most_rows: int
    fit: Fit
    prediction: Prediction
    num_prompts: int
    output_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.prediction.tokens_per_s * self.num_replicas

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.prediction.tokens_per_s / self.num_gpus

    @property
    def hours(self) -> float:
        return self.num_prompts * self.output_tokens / self.tokens_per_s / S_PER_HOUR

    @property
    def is_runnable(self) -> bool:
        return self.settings.mode != "colocated" or self.tp_size == 1

    @property
    def num_processes(self) -> int:
        """Processes to launch for one replica."""
        return 1 if self.settings.mode == "colocated" else self.num_gpus


class Planner:
    """Searches plans for a pair of models (or a target alone) on a site."""

    def __init__(self, target: ModelSize, draft: ModelSize | None, site: Site, work: Work) -> None:
        self._target = target
        self._draft = draft
        self._site = site
        self._work = work
        self._costs = cache(self._measure)

    def best_plans(self) -> list[Plan]:
        """For each mode that fits, in the order of :data:`MODES`, the plan with the most tokens per second on
        the whole site; for colocation also the best runnable one."""
        found: list[Plan] = []
        for mode in MODES:
            plans = list(self._plans(mode))
            runnable = [plan for plan in plans if plan.is_runnable]
            for choice in (runnable, plans):
                best = max(choice, key=lambda plan: plan.tokens_per_s, default=None)
                if best is not None and best not in found:
                    found.append(best)
        return found

    def most_per_gpu(self, mode: Mode, num_rows: int, *, num_idle: int = 0) -> float | None:
        """The most tokens per second per GPU used of replicas with so many sequences at a time, or as many of
        them as fit; None if none fits. ``num_idle``: further GPUs of each, which have nothing to do."""
        found = [
            prediction.tokens_per_s / (tp_size + (mode in OWN_GPU) + num_idle)
            for tp_size in self._tp_sizes(mode)
            for length in ([0] if mode == "target only" else range(1, MAX_DRAFT_TOKENS + 1))
            for most in [min(num_rows, self._fit(mode, tp_size, length).most_rows)]
            if most > 0
            for prediction in [self._predict(mode, tp_size, most, length)]
        ]
        return max(found, default=None)

    def fits(self) -> list[tuple[Mode, int, Fit]]:
        """The memory of every mode and number of ranks, whether it fits or not."""
        return [
            (mode, tp_size, self._fit(mode, tp_size, 1))
            for mode in MODES
            if mode not in ("in turns", "branches")
            for tp_size in self._tp_sizes(mode)
        ]

    def _tp_sizes(self, mode: Mode) -> list[int]:
        if mode != "target only" and self._draft is None:
            return []
        return self._target.tp_sizes(self._site.gpus_per_node - (mode in OWN_GPU))

    def _fit(self, mode: Mode, tp_size: int, num_draft_tokens: int) -> Fit:
        return fit(
            self._target,
            self._draft,
            self._site.gpu,
            mode,
            tp_size=tp_size,
            row_tokens=self._work.row_tokens,
            num_draft_tokens=num_draft_tokens,
            num_branches=self._settings(mode, 1, num_draft_tokens).num_branches,
        )

    def _plans(self, mode: Mode) -> Iterator[Plan]:
        lengths = [0] if mode == "target only" else range(1, MAX_DRAFT_TOKENS + 1)
        for tp_size in self._tp_sizes(mode):
            num_gpus = tp_size + (mode in OWN_GPU)
            num_replicas = self._site.gpus_per_node // num_gpus * self._site.num_nodes
            for length in lengths:
                room = self._fit(mode, tp_size, length)
                most = min(room.most_rows, -(-self._work.num_prompts // num_replicas))
                for num_rows in _batch_sizes(min(most, self._site.max_num_seqs or most)):
                    settings = self._settings(mode, num_rows, length)
                    yield Plan(
                        settings=settings,
                        tp_size=tp_size,
                        num_gpus=num_gpus,
                        # Fewer prompts than replicas leave some without work.
                        num_replicas=min(num_replicas, self._work.num_prompts),
                        most_rows=room.most_rows,
                        fit=room,
                        prediction=self._predict(mode, tp_size, num_rows, length),
                        num_prompts=self._work.num_prompts,
                        output_tokens=self._work.output_tokens,
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
                counts=counts,
            )
            for model, ranks, counts in ((self._target, tp_size, TARGET_PASS), (self._draft, 1, DRAFT_PASS))
        )
        assert target is not None
        draft_rows = num_rows * (1 + self._settings("branches", num_rows, 1).num_branches)
        return roofline_costs(
            target,
            draft,
            num_rows=num_rows,
            most_tokens=num_rows * (MAX_DRAFT_TOKENS + 1) + PREFILL_CHUNK_TOKENS,
            most_draft_rows=max(2 * num_rows, draft_rows),
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
    """The runnable plan with the most tokens per second; a later mode, which is less simple, must be clearly
    faster. None if no plan is runnable."""
    chosen: Plan | None = None
    for plan in plans:
        if plan.is_runnable and (chosen is None or plan.tokens_per_s > WORTHWHILE * chosen.tokens_per_s):
            chosen = plan
    return chosen
