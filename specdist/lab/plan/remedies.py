"""What helps where memory binds: options to type, each of which has been planned with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from specdist.lab.plan.advise import MOST_GPUS, WORTHWHILE, Plan, Planner
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.options import PlanConfig
from specdist.lab.plan.report import setting
from specdist.utils.errors import UserError


def find_remedies(
    config: PlanConfig, planner: Planner, chosen: Plan | None, planner_of: Callable[[PlanConfig], Planner]
) -> Iterator[str]:
    """Lines with an option and what it gives: of each option the first value with which the target fits,
    where nothing does (``chosen`` is None), or with which a GPU has clearly more tokens per second.
    ``planner_of``: of other options; it may refuse them."""
    for name, values in _options(config, planner, does_fit=chosen is not None):
        for value in values:
            try:
                other = planner_of(replace(config, **{name: value}))
            except UserError:
                continue
            plan = other.best("target only" if chosen is None else chosen.settings.mode)
            gain = plan and (plan.tokens_per_s_per_gpu / (chosen or plan).tokens_per_s_per_gpu)
            if plan and gain and (chosen is None or gain >= WORTHWHILE):
                times = f", {gain:.2f} times per GPU" if chosen else ""
                rate = f"{plan.tokens_per_s:,.0f} tokens/s{times}"
                yield f"- --{name} {value}: {rate} ({plan.num_replicas} x {setting(plan)})"
                break


def _options(config: PlanConfig, planner: Planner, *, does_fit: bool) -> Iterator[tuple[str, list[Any]]]:
    yield "cache_dtype", ["float8"]
    # Experts are not quantised while they are loaded, and a checkpoint may be refused.
    yield "target_quantization", [] if planner.target.experts else ["float8", "int8"]
    yield "draft_quantization", ["int8"] if planner.draft and does_fit else []
    yield "gpus_per_node", [num for num in (2, 4, MOST_GPUS) if num > config.gpus_per_node]
    if not does_fit:
        gpus = sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes)
        yield "gpu", [gpu.name for gpu in gpus if gpu.memory_bytes > planner.site.gpu.memory_bytes]
        yield "prompt_tokens", [config.prompt_tokens >> halved for halved in range(1, 9)]
