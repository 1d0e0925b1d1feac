"""The comparison of length policies on a tiny pair: from options to result file, tables and README."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from specdist.lab.benchmark.methods import Generated, Specdist
from specdist.lab.benchmark.pair import DraftOrder
from specdist.lab.benchmark.report import summary
from specdist.lab.benchmark.results import KIND
from specdist.policies.choice import PolicyChoice
from specdist.policies.costs import CostModel, Curve
from specdist.policies.registry import HEAD_KINDS
from tests.job.heads import write_head
from tests.lab.benchmark import run as comparison_run
from tests.lab.benchmark.config import ComparisonConfig
from tests.lab.benchmark.results import ComparedMethod, ComparisonResult
from tests.lab.benchmark.run import run_comparison
from tests.lab.benchmark.setting import ComparedSetting
from tests.lab.benchmark.tables import console_report, markdown_report, num_devices
from tests.ranks import REPOSITORY

SVIP = "svip stop_root_entropy=1"
POLICIES = ["fixed", "gammatune", SVIP.replace(" ", ":"), "goodput"]
LENGTHS = [1, 3]

GROUPS = {"ask": ["one", "two and a bit", "three"], "tell": ["four is the longest of them", "five", "six"]}


def config_for(setting: ComparedSetting, folder: Path, **options: Any) -> ComparisonConfig:
    """The tiny pair on two groups of three rows."""
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": text, "task": task} for task, texts in GROUPS.items() for text in texts]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "output": str(folder / "r.json"),
        "target": str(setting.pair.target_checkpoint.folder),
        "draft": str(setting.pair.draft_checkpoint.folder),
        "prompts": str(prompts),
        "group_column": "task",
        "policies": POLICIES,
        "initial_lengths": LENGTHS,
        "max_new_tokens": 12,
        "batch_sizes": [2],
        "repeats": 2,
        "overhead_repeats": 2,
        "device": "cpu",
    }
    return ComparisonConfig(**(values | options))


@pytest.fixture(scope="module")
def result(setting: ComparedSetting, tmp_path_factory: pytest.TempPathFactory) -> ComparisonResult:
    config = config_for(
        setting, tmp_path_factory.mktemp("policies"), placements=["colocated", "separate"], num_branches=2
    )
    found = run_comparison(config, "python -m tests.lab.benchmark --some option")
    assert config.output is not None
    assert ComparisonResult.read(Path(config.output)) == found
    return found


def method(result: ComparisonResult, name: str) -> ComparedMethod:
    [found] = [item for item in result.methods if item.name == f"specdist, {name}"]
    return found


@pytest.mark.ranks
def test_every_policy_runs_in_every_placement_with_every_first_length(result: ComparisonResult) -> None:
    labels = ["K = 1", "K = 3", "gammatune from 1", "gammatune from 3", SVIP, "goodput"]
    ways = ["", ", separate", ", asynchronous, 2 branches"]
    assert {item.name for item in result.methods} == {
        "specdist, target only",
        *(f"specdist, {label}{way}" for label in labels for way in ways),
    }
    assert result.costs.keys() == {f"{way}, batch 2" for way in ("colocated", "separate")} | {
        "separate, batch 2, with features"
    }
    for item in result.methods:
        assert len(item.seconds) == len(item.num_tokens) == 2
        # float32, and a random model of peaked logits: no near-tie.
        assert item.num_rows_differing == 0
        assert item.num_tokens == result.methods[0].num_tokens
        assert item.ratio_to_assisted is None and item.ratio_to_generate is None


@pytest.mark.ranks
def test_the_groups_add_up_to_the_total(result: ComparisonResult) -> None:
    alone = method(result, "target only")
    assert alone.ratio_to_target_only == alone.decoding_ratio_to_target_only == 1
    for item in result.methods:
        assert [group.name for group in item.groups] == list(GROUPS)
        assert [group.num_rows for group in item.groups] == [3, 3]
        for repeat in range(2):
            assert item.seconds[repeat] == pytest.approx(sum(group.seconds[repeat] for group in item.groups))
            assert item.num_tokens[repeat] == sum(group.num_tokens[repeat] for group in item.groups)
        rates = [count / each for count, each in zip(item.num_tokens, item.seconds, strict=True)]
        assert item.tokens_per_s == pytest.approx(statistics.median(rates))
        assert item.ratio_to_target_only == pytest.approx(item.tokens_per_s / alone.tokens_per_s)
        for group, base in zip(item.groups, alone.groups, strict=True):
            assert group.ratio_to_target_only == pytest.approx(group.tokens_per_s / base.tokens_per_s)
        assert item.decoding_ratio_to_target_only is not None and item.decoding_ratio_to_target_only > 0


@pytest.mark.ranks
def test_a_separate_draft_that_takes_turns_changes_no_count_of_a_policy_without_costs(
    result: ComparisonResult,
) -> None:
    rates = {}
    for label in ("K = 1", "K = 3", "gammatune from 1", "gammatune from 3", SVIP):
        here, there = method(result, label), method(result, f"{label}, separate")
        assert here.statistics is not None and there.statistics is not None
        for name in ("verification_rate", "discard_rate", "draft_acceptance_rate"):
            assert here.statistics[name] == there.statistics[name]
        rates[label] = here.statistics["verification_rate"], here.statistics["discard_rate"]
    # Five settings of five kinds: none was run in place of another.
    assert len(set(rates.values())) == 5
    assert rates["K = 3"][0] < rates["K = 1"][0]
    assert rates["K = 3"][1] > rates["K = 1"][1]


@pytest.mark.ranks
def test_the_spread_is_that_of_the_measured_ratios(result: ComparisonResult) -> None:
    assert {(spread.family, spread.placement) for spread in result.spreads} == {
        (family, placement)
        for family in ("fixed", "gammatune")
        for placement in ("colocated", "separate", "asynchronous")
    }
    for spread in result.spreads:
        ratios = [
            item.ratio_to_target_only
            for length in LENGTHS
            for item in result.methods
            if item.policy is not None
            and (item.policy.family, item.policy.placement) == (spread.family, spread.placement)
            and item.policy.first_length == length
        ]
        assert spread.first_lengths == LENGTHS and spread.ratios == ratios
        assert spread.mean == pytest.approx(statistics.mean(spread.ratios))
        assert (spread.mean_to_fixed == 1) == (spread.family == "fixed")


@pytest.mark.ranks
def test_the_overhead_is_measured_for_each_policy(result: ComparisonResult) -> None:
    # Of several first lengths the nearest to the default of 5.
    assert [item.label for item in result.policy_overhead] == ["K = 3", "gammatune from 3", SVIP, "goodput"]
    for item in result.policy_overhead:
        assert (item.features_s > 0) == (item.label in (SVIP, "goodput"))
        # A constant length is not asked for.
        assert (item.policy_s > 0) == (item.label != "K = 3") and item.policy_s < item.round_s
        assert item.share == pytest.approx((item.features_s + item.policy_s) / item.round_s)
    [whole] = result.feature_overhead
    assert (whole.batch_size, whole.num_draft_tokens, whole.num_pairs) == (2, 5, 2)
    assert whole.lower_s <= whole.extra_s <= whole.upper_s
    assert whole.round_s > 0


@pytest.mark.ranks
def test_the_console_and_the_markdown_show_the_same_tables(result: ComparisonResult) -> None:
    text = console_report(result)
    for heading in (
        "6 rows in 2 groups, each timed separately",
        "by the first draft length",
        "by group:",
        "Where the draft runs",
        "Cost of features and policies:",
        "by pairs of runs",
    ):
        assert heading in text
    assert "assisted" not in text
    lines = markdown_report(result).splitlines()
    spread = next(
        item for item in result.spreads if item.family == "gammatune" and item.placement == "asynchronous"
    )
    num = num_devices(result, "asynchronous")
    assert num == 2 or result.hardware.num_threads > 1
    first, second, mean, deviation, width = (
        value / num for value in (*spread.ratios, spread.mean, spread.deviation, spread.range)
    )
    assert lines.count(
        f"| gammatune | 2 | asynchronous | {first:.2f} | {second:.2f} | {mean:.2f} | {deviation:.3f} "
        f"| {width:.2f} | {spread.mean_to_fixed:.2f} ± {spread.deviation_to_fixed:.2f} |"
    ) == 1  # fmt: skip
    goodput = method(result, "goodput, asynchronous, 2 branches")
    assert goodput.statistics is not None and goodput.ratio_to_target_only is not None
    [line] = [line for line in lines if line.startswith("| goodput | 2 | asynchronous, 2 branches |")]
    assert f"| {goodput.tokens_per_s:.1f} | {goodput.ratio_to_target_only / num:.2f} |" in line
    assert f"| {goodput.statistics['verification_rate']:.3f} |" in line
    ratios = [group.ratio_to_target_only for group in goodput.groups]
    shares = f"{ratios[0] / num:.2f} | {ratios[1] / num:.2f}"
    assert f"| goodput | 2 | asynchronous | {shares} |" in "\n".join(lines)
    # Those that begin with 1 are in the means alone.
    assert not any(line.startswith(("| K = 1 ", "| gammatune from 1 ")) for line in lines)
    assert summary(result)["num_rows_differing"] == 0


def test_with_coupled_noise_every_policy_emits_the_tokens_of_the_target_alone(
    setting: ComparedSetting, tmp_path: Path
) -> None:
    shared = {"repeats": 1, "overhead_repeats": 0, "temperature": 1.0, "group_column": None}
    config = config_for(setting, tmp_path, **shared, acceptance_rule="gumbel", seed=1)
    found = run_comparison(config, "")
    assert [item.num_rows_differing for item in found.methods] == [0] * 7
    assert found.methods[0].groups == [] and "by group" not in console_report(found)
    assert 0 < found.methods[2].statistics["draft_acceptance_rate"] < 1  # type: ignore[index]
    config = config_for(setting, tmp_path, **shared, policies=["fixed"], seed=1)
    assert {item.num_rows_differing for item in run_comparison(config, "").methods} == {None}


@pytest.mark.parametrize("policy", ["gammatune", "adaedl", "goodput"])
def test_a_policy_starts_every_run_afresh(setting: ComparedSetting, policy: str) -> None:
    """The second run has the counts of the first, and both have those of a fresh policy."""
    costs = CostModel(Curve([1, 16], [10_000, 12_000]), Curve([1, 8], [1_000, 1_500]))
    order = DraftOrder(num_slots=3, choice=PolicyChoice.of(policy, max_draft_tokens=3), costs=costs)
    methods = [Specdist(setting.paged, order)] * 2 + [Specdist(setting.paged, order)]
    counts = []
    for item in methods:
        item.prepare()
        stats = item.generate(setting.rows).stats
        assert stats is not None
        counts.append((stats.num_draft_tokens, stats.num_row_steps, stats.draft_length_histogram))
    assert counts[0][0] > 0
    assert counts[0] == counts[1] == counts[2]


def test_a_run_that_is_interrupted_leaves_the_repeats_before(
    setting: ComparedSetting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, num_calls = Specdist.generate, 0

    def interrupted(self: Specdist, *arguments: Any) -> Generated:
        nonlocal num_calls
        num_calls += 1
        # Two methods on two groups: a warm-up each, a repeat, and again.
        if num_calls > 4 + 4 + 3:
            raise KeyboardInterrupt
        return generate(self, *arguments)

    monkeypatch.setattr(Specdist, "generate", interrupted)
    config = config_for(setting, tmp_path, policies=["svip"], initial_lengths=None)
    with pytest.raises(KeyboardInterrupt):
        run_comparison(config, "")
    found = ComparisonResult.read(tmp_path / "r.json")
    assert [len(item.seconds) for item in found.methods] == [1, 1]
    assert "repeats, taken in turn: 1" in console_report(found)


def test_published_result_files_can_still_be_read(tmp_path: Path) -> None:
    """The files from which the README's tables were generated."""
    paths = sorted((REPOSITORY / "jobs" / "benchmarks").glob("*.json"))
    results = [path for path in paths if json.loads(path.read_text()).get("kind") == KIND]
    assert len(results) >= 6
    for path in results:
        assert console_report(ComparisonResult.read(path)).count("tokens/s") > 0


def test_overhead_is_measured_only_with_the_draft_in_this_process(
    setting: ComparedSetting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        comparison_run, "measure_policies", lambda _, orders, *rest: asked.extend(orders) or []
    )
    config = config_for(setting, tmp_path, policies=["svip", "fixed"], repeats=1, num_draft_tokens=1)
    found = run_comparison(config, "")
    assert [order.choice.label for order in asked] == ["svip", "K = 1"]
    assert [item.num_draft_tokens for item in found.feature_overhead] == [1]
    assert found.policy_overhead == []


@pytest.mark.parametrize("policy", ["specdecpp", "sprinter", "goodput+head"])
def test_a_policy_that_reads_a_head_is_measured_beside_the_others(
    setting: ComparedSetting, tmp_path: Path, policy: str
) -> None:
    """It drafts by the head and generates what the others do, as does the same policy without the head."""
    name = policy.removesuffix("+head")
    label = policy.replace("+", " with ")
    others = ["svip"] if name == policy else ["svip", name]
    head = write_head(tmp_path / "head", HEAD_KINDS[name], setting.pair.draft_checkpoint.folder)
    config = config_for(setting, tmp_path, policies=[*others, policy], initial_lengths=None, head=str(head))
    result = run_comparison(config, "python -m tests.lab.benchmark --some option")
    found = method(result, label)
    assert found.statistics is not None
    assert found.statistics["discard_rate"] > 0 and found.statistics["verification_rate"] < 1
    assert {item.label for item in result.policy_overhead} == {*others, label}
    assert found.num_tokens == method(result, "svip").num_tokens
    assert [item.depth for item in result.head_overhead] == [0, 1, 3]
    for item in result.head_overhead:
        assert item.step_s > 0 < item.head_s and item.lower <= item.share <= item.upper
    assert "Cost of a head, beside a draft step" in console_report(result)
