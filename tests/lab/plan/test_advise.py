"""What fits, which plan is best, and why."""

from __future__ import annotations

import pytest
import torch

from specdist.job.costs.allocation import PAGE_SIZE
from specdist.lab.plan.advise import Planner, Site, Work, recommend
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.memory import fit
from specdist.lab.plan.report import plan_table, reason
from specdist.lab.plan.shapes import SHAPES
from specdist.models.sizes.sizes import ModelSize, model_size

GPU = GPUS["h100-sxm"]


def size(name: str) -> ModelSize:
    return model_size(name, SHAPES[name].llama_config(torch.bfloat16), 2)


LARGE, SMALL = size("70b"), size("1b")


def work(*, num_prompts: int = 10_000, acceptance: float = 0.8, prompt_tokens: int = 512) -> Work:
    return Work(
        prompt_tokens=prompt_tokens,
        output_tokens=256,
        num_prompts=num_prompts,
        acceptance=acceptance,
        caught=0.5,
    )


def planner(task: Work, *, gpus: int, target: ModelSize = LARGE, nodes: int = 1) -> Planner:
    return Planner(target, SMALL, Site(gpu=GPU, gpus_per_node=gpus, num_nodes=nodes), task)


def test_rows_that_fit_are_those_that_the_memory_divides_into() -> None:
    found = fit(LARGE, SMALL, GPU, "asynchronous", tp_size=4, row_tokens=1000)
    share = found.target
    row = 63 * PAGE_SIZE * LARGE.cache_bytes_per_token(4)
    assert share.cache_bytes_per_row == row
    assert share.usable_bytes + share.reserved_bytes + GPU.reserved_bytes == GPU.memory_bytes
    left = share.usable_bytes - LARGE.weight_bytes(4)
    assert found.most_rows == share.most_rows
    # One row more would need more for itself, and more for passes.
    assert left - 2 * row < found.most_rows * row <= left
    assert found.draft is not None and found.draft.most_rows > found.most_rows


def test_few_rows_speculate_and_many_do_not() -> None:
    site = planner(work(num_prompts=8), gpus=5)
    few, many = site.best_plans(), planner(work(num_prompts=100_000), gpus=4).best_plans()
    chosen, plain = recommend(few), recommend(many)
    assert chosen is not None and plain is not None
    assert chosen.settings.mode == "branches" and chosen.num_gpus == 5
    assert chosen.tokens_per_s > 2 * few[0].tokens_per_s
    assert plain.settings.mode == "target only" and plain.num_gpus == 4
    assert "times the tokens/s of plain decoding" in reason(few, chosen, site)
    why = reason(many, plain, site)
    assert "Do not speculate" in why and "and target only" not in why


def test_the_draft_shares_rank_0_where_a_gpu_of_its_own_would_leave_others_idle() -> None:
    """8 GPUs are two targets of four, or one with a draft and three GPUs without work."""
    site = planner(work(num_prompts=64), gpus=8)
    plans = site.best_plans()
    found = {plan.settings.mode: plan for plan in plans}
    shared, own = found["colocated"], found["branches"]
    assert recommend(plans) is shared
    assert (shared.tp_size, shared.num_gpus, shared.num_replicas) == (4, 4, 2)
    assert shared.num_gpus * shared.num_replicas == 8 > own.num_gpus * own.num_replicas
    # Replicas of few ranks beside fewer of more.
    ranks = [(plan.tp_size, plan.num_replicas) for plan in site.by_ranks("colocated")]
    assert ranks == [(2, 4), (4, 2), (8, 1)]
    assert plan_table(site, shared).count("draft on rank 0  ") == 3


def test_a_draft_on_rank_0_takes_its_memory_there() -> None:
    """And branches take memory from the draft: scores and pages."""
    alone, both, own, forked = (
        fit(LARGE, SMALL, GPU, mode, tp_size=4, row_tokens=1000, num_draft_tokens=4, num_branches=branches)
        for mode, branches in (("target only", 0), ("colocated", 0), ("asynchronous", 0), ("branches", 8))
    )
    assert forked.target == own.target and own.draft and forked.draft
    assert forked.draft.most_rows < own.draft.most_rows
    assert both.draft is None and alone.draft is None and own.draft is not None
    assert both.target.weight_bytes == alone.target.weight_bytes + SMALL.weight_bytes(1)
    per_row = both.target.cache_bytes_per_row - alone.target.cache_bytes_per_row
    assert per_row == 63 * PAGE_SIZE * SMALL.cache_bytes_per_token(1)
    assert alone.most_rows > own.most_rows > both.most_rows > 0.65 * alone.most_rows


def test_small_models_are_replicated_over_gpus_and_nodes() -> None:
    plans = planner(work(), gpus=8, target=size("7b"), nodes=2).best_plans()
    plain = plans[0]
    assert (plain.tp_size, plain.num_replicas) == (1, 16)
    assert plain.tokens_per_s == pytest.approx(16 * plain.prediction.tokens_per_s)
    assert plain.hours == pytest.approx(10_000 * 256 / plain.tokens_per_s / 3600)
    assert plain.settings.num_rows <= 625
    ahead = next(plan for plan in plans if plan.settings.mode == "asynchronous")
    assert ahead.num_replicas * ahead.num_gpus <= 16
