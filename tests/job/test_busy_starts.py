"""Costs that were measured while the machine was busy: they are measured again, and corrected."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.shard import Stats
from specdist.job.costs import corrections, measuring
from specdist.job.costs.corrections import Corrections, scaled
from specdist.job.models.model_plan import plan_models
from specdist.job.ranks.topology import topology_from_environment
from specdist.job.replica import replica
from specdist.job.run.preflight import freeze_costs, plan_run
from specdist.job.totals.report import all_costs
from specdist.policies import pass_ratios
from specdist.policies.costs import ContextCosts, CostModel, Curve
from specdist.policies.pass_ratios import PassRatios
from tests.job.given_costs import generate_after_a_busy_start, give_in_turn
from tests.job.launching import parse, run_here
from tests.job.ranks import fork_ranks

COSTS = CostModel(
    Curve([1, 8], [2000, 3000]), Curve([1, 8], [100, 100]), ContextCosts(7, 8, 1.0, 2.0, 3.0, 4.0, 5.0)
)
SAMPLED: dict[str, Any] = {"policy": "goodput", "temperature": 1.0, "max_num_seqs": 4}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the job measures is given, and nothing else depends on this machine's own load."""
    names = ("measure_target", "measure_draft")
    for module, name in (
        *((measuring, name) for name in names), (corrections, "MANY_PASSES"), (pass_ratios, "LEAST_COMPARED"),
        (replica, "rehearsed_costs"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, getattr(module, name))
    yield


def stats_of(output: Path) -> list[Stats]:
    return [Stats.from_json(each) for each in RunFolder(output).shard_stats()]


def test_a_run_that_never_drafts_for_its_costs_measures_them_again_at_a_shards_border(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Alone it notices that a false cost is used to a run's end."""
    assert run_here(generate_after_a_busy_start, **options | SAMPLED, output=tmp_path / "run").code == 0
    check_corrected(tmp_path / "run", [0, 1, 1])


@pytest.mark.ranks
def test_so_does_a_draft_on_a_rank_of_its_own(options: dict[str, Any], tmp_path: Path) -> None:
    """Alone it notices that the ranks measure at different times, or decide by different costs."""
    run = options | SAMPLED | {"overlap": "synchronous", "output": tmp_path / "run"}
    assert fork_ranks(2, generate_after_a_busy_start, **run).code == 0
    check_corrected(tmp_path / "run", [0, 1, 1])


def check_corrected(output: Path, revisions: list[int]) -> None:
    first, *others = found = stats_of(output)
    assert [each.costs_revision for each in found] == revisions
    assert not first.num_draft_tokens and all(each.num_draft_tokens for each in others)
    assert [each.draft.ns[0] for each in all_costs(RunFolder(output))] == [1_000_000_000, 1_000_000]


def test_real_rounds_correct_costs_at_a_shards_border(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it notices that the rounds are not compared, or are compared with what does not decide them."""
    give_in_turn([1_000_000])
    monkeypatch.setattr(pass_ratios, "MOST_OFF", 1 + 1e-9)
    monkeypatch.setattr(pass_ratios, "LEAST_COMPARED", 4)
    ended = run_here(**options | SAMPLED, output=tmp_path / "run")
    assert ended.code == 0 and "in real rounds passes of the target take" in ended.stderr
    first, second, *_ = all_costs(RunFolder(tmp_path / "run"))
    assert first.target.ns != second.target.ns and first.draft.ns != second.draft.ns
    assert [each.costs_revision for each in stats_of(tmp_path / "run")][:2] == [0, 1]


def test_medians_of_rounds_scale_costs_that_are_off_from_each_other() -> None:
    """Alone it notices a mean, which one disturbed second moves, or a correction where both are as slow."""
    for of_draft, expected in ((1.5, None), (3.0, None), (0.01, (2.0, 0.01))):
        ratios = PassRatios(COSTS)
        for index in range(40):
            ratios.observe_target(4, round(2 * COSTS.target.look_up(4)))
            ratios.observe_draft([8], round(100 * of_draft) if index % 4 else 10**12, is_asynchronous=False)
            ratios.observe_draft([8, 500], 10**12, is_asynchronous=False)
        assert ratios.factors() == (expected and pytest.approx(expected, rel=1e-3))
    found = scaled(COSTS, 2.0, 0.01)
    assert (found.target.ns, found.draft.ns) == ([4000, 6000], [1, 1])
    assert dataclasses.astuple(found.context) == pytest.approx((7, 8, 2.0, 4.0, 0.03, 0.04, 0.05))


def test_a_restart_goes_on_with_the_costs_that_a_shard_was_begun_with(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Alone it notices that a correction, this replica's or another's, reaches a shard that is begun; in a
    run whose tokens depend on no cost that is allowed."""
    config = parse(**options, policy="goodput", output=tmp_path / "run")
    run = plan_run(config, plan_models(config), topology_from_environment(config))
    faster, used = dataclasses.replace(COSTS, draft=Curve([1], [7])), []

    def use(costs: CostModel | None, agree: object) -> CostModel:
        used.append(costs)
        assert costs is not None
        return costs

    freeze_costs(run, COSTS)
    here = Corrections(run, COSTS, at_any_time=False)
    begun, new = Stats(), Stats()
    assert here.may_begin(begun, is_new=True)
    assert freeze_costs(run, faster, instead_of=COSTS) == faster
    # Another replica's, for what was corrected already.
    assert freeze_costs(run, COSTS, instead_of=COSTS) == faster
    assert here.may_begin(begun, is_new=False) and not here.may_begin(new, is_new=True)
    here.change(new, use, is_new=True)
    assert here.may_begin(new, is_new=True) and new.costs_revision == 1
    restarted = Corrections(run, faster, at_any_time=False)
    assert not restarted.may_begin(begun, is_new=False)
    restarted.change(begun, use, is_new=False)
    assert restarted.may_begin(begun, is_new=False) and used == [faster, COSTS]
    assert Corrections(run, faster, at_any_time=True).may_begin(begun, is_new=False)
    run.membership.leave()
