"""How far to draft ahead, and with how many branches, as measured times suggest."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdist.job.models.model_plan import plan_models
from specdist.job.ranks.topology import topology_from_environment
from specdist.job.replica.plan import ReplicaPlan, drafting_gain, plan_asynchronous
from specdist.job.run.preflight import freeze_costs, plan_run
from specdist.job.run.workload import Workload
from specdist.policies.costs import BRANCH_COUNTS, CostModel, Curve
from specdist.policies.formulas import tokens_per_call
from tests.job.launching import parse

MAX_DRAFT_TOKENS = 5


def plan(target_pass: int, draft_steps: list[int], num_branches: int | None = None) -> tuple[int, int]:
    """For one row: a pass takes the same time whatever its size, a draft step what 0, 1, 2, 4 or 8 branches
    make it."""
    costs = CostModel(Curve([1], [target_pass]), Curve([1, 2, 3, 5, 9], draft_steps))
    found = plan_asynchronous(
        costs, num_rows=1, max_draft_tokens=MAX_DRAFT_TOKENS, num_branches=num_branches, acceptance=0.8
    )
    return found.num_ahead, found.num_branches


def test_the_draft_works_as_far_ahead_and_in_as_many_branches_as_a_pass_leaves_time_for() -> None:
    assert plan(1000, [1] * 5) == (MAX_DRAFT_TOKENS + 1, BRANCH_COUNTS[-1])
    # Six steps of which five are wide: 10 + 5 x 18 fits into 100, 10 + 5 x 30 does not.
    assert plan(100, [10, 12, 18, 30, 60]) == (6, 2)
    assert plan(100, [10, 200, 400, 800, 1600]) == (6, 0)
    # As slow as the target: one token ahead.
    assert plan(100, [100, 200, 300, 500, 900]) == (1, 0)
    # A number of branches that was asked for is kept.
    assert plan(100, [10, 200, 400, 800, 1600], num_branches=3)[1] == 3
    assert plan(100, [10, 20, 30, 50, 90], num_branches=0) == (6, 0)


def test_the_pass_is_that_of_the_candidates_that_are_ready_and_the_host_takes_its_part() -> None:
    """A pass of 21 tokens leaves time for as many steps; those with the few that are ready do not."""
    costs = CostModel(Curve([1, 21], [100, 500]), Curve([1], [20]))
    sizes: dict[str, Any] = {"num_rows": 1, "max_draft_tokens": 20, "num_branches": 0, "acceptance": 0.8}
    found = plan_asynchronous(costs, **sizes)
    busy = plan_asynchronous(dataclasses.replace(costs, asynchronous=Curve([1], [60])), **sizes)
    assert 2 < busy.num_ahead < found.num_ahead < 10


def advice(target: Curve, *, device: str = "cuda:0", num_rows: int = 64) -> str | None:
    """Of four ranks of a target, and one of a draft whose steps take a tenth of its shortest pass."""
    costs = CostModel(target, Curve([1], [100]))
    run: Any = SimpleNamespace(
        config=SimpleNamespace(policy_choice=SimpleNamespace(max_draft_tokens=8)),
        topology=SimpleNamespace(device=torch.device(device), tp_size=4),
        scheduling=SimpleNamespace(num_slots=256),
        workload=Workload(num_rows=num_rows),
        is_asynchronous=True,
        branch_counts=(0, 2),
    )
    return ReplicaPlan.advice(run, costs)


def test_a_gpu_that_is_hardly_used_is_told_of_at_the_start() -> None:
    """As long as passes read weights, drafting pays; where every token of a pass takes its time, no more."""
    reading = Curve([1, 1000], [1000, 1010])
    computing = Curve([1, 1000], [1000, 20_000])
    assert advice(reading) is None and advice(computing, device="cpu", num_rows=256) is None
    assert advice(computing, num_rows=1) is None
    told = advice(computing, num_rows=256)
    assert told is not None and "256 sequences" in told and "1.25 times its GPUs" in told
    assert "--num_processes 4" in told


def test_a_gain_is_that_of_the_best_rounds() -> None:
    sizes = {"num_rows": 1, "max_draft_tokens": 8, "acceptance": 0.8, "branch_counts": (0,)}
    slow = CostModel(Curve([1], [100]), Curve([1], [1000]))
    assert drafting_gain(slow, **sizes) == 1
    # Steps that take nothing: as much as the longest block brings, or more, ahead.
    free = CostModel(Curve([1], [10**6]), Curve([1], [1]))
    assert drafting_gain(free, **sizes) == pytest.approx(tokens_per_call(0.8, 8), rel=0.01)


def test_every_replica_uses_the_costs_that_were_frozen_first(options: dict[str, Any], tmp_path: Path) -> None:
    """Two replicas that start together both measure; both then use the same times."""
    config = parse(**options, policy="goodput", output=tmp_path / "run")
    topology = topology_from_environment(config)
    first, second = (plan_run(config, plan_models(config), topology) for _ in range(2))
    costs = [CostModel(Curve([1], [ns]), Curve([1], [ns])) for ns in (3, 4)]
    assert [freeze_costs(run, own) for run, own in zip((first, second), costs, strict=True)] == [costs[0]] * 2
    assert second.folder.manifest.info["costs"] == costs[0].to_json()
    for run in (first, second):
        run.membership.leave()
