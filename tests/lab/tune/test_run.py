"""The tuning job on a tiny pair: what it leaves, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdist import SamplingOptions, SpeculativeLLM
from specdist.config.generate import parse_generate_config
from specdist.lab.replay import ExhaustiveTrace
from specdist.lab.tune.config import TuneConfig
from specdist.lab.tune.grid import candidates
from specdist.lab.tune.report import best_yaml, console_report, summary, write_report
from specdist.lab.tune.run import COSTS_FILE, TRACE_FILE, TuningResult, collect_trace, run_tuning
from specdist.policies.costs import CostModel, Curve
from specdist.policies.registry import HEAD_POLICIES, OPTIONS, POLICIES
from specdist.utils.errors import UserError
from tests.job.heads import write_head
from tests.job.launching import read_output, run_here
from tests.job.pair import EOS_TOKEN, Pair, windowed_target, write_arrow

PNG = b"\x89PNG"
CAP = 6


@pytest.fixture(scope="module")
def options(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "prompts": str(pair.prompts),
        "target": str(pair.target),
        "draft": str(pair.draft),
        "output": str(tmp_path_factory.mktemp("tune") / "out"),
        "device": "cpu",
        "temperature": 0.0,
        "num_prompts": 6,
        "max_new_tokens": 16,
        "max_draft_tokens": CAP,
        "max_num_seqs": 3,
    }


@pytest.fixture(scope="module")
def result(options: dict[str, Any]) -> TuningResult:
    found = run_tuning(TuneConfig(**options))
    write_report(found)
    return found


def test_a_target_whose_layers_have_windows_judges_whole_completions(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A draft of its own weights is always right, whether the target gives pages back while it generates."""
    model = str(windowed_target(tmp_path / "model"))
    more = {"target": model, "draft": model, "output": str(tmp_path / "out"), "temperature": 1.0}
    config = TuneConfig(**options | more | {"num_prompts": 1, "max_new_tokens": 300, "max_num_seqs": 32})
    trace, _ = collect_trace(config, [])
    for prompt in trace.prompts:
        assert np.nanmin(prompt.acceptance_ND) > 0.99


def test_it_sorts_every_candidate_by_what_it_predicts(result: TuningResult) -> None:
    rates = [outcome.batched.tokens_per_s for outcome in result.outcomes]
    assert rates == sorted(rates, reverse=True)
    assert {outcome.candidate.policy for outcome in result.outcomes} == {*POLICIES, "none"} - set(
        HEAD_POLICIES
    )
    assert result.oracle is not None
    for outcome in result.outcomes:
        assert outcome.batched.verification_rate >= result.oracle.batched.verification_rate


def test_it_leaves_options_that_the_main_job_takes(
    result: TuningResult, options: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    best = Path(options["output"], "best.yaml")
    config = parse_generate_config(
        ["--config", str(best), "--prompts", str(pair.prompts), "--output", str(tmp_path / "run")]
    )
    assert config.policy == result.best.candidate.policy
    assert config.policy_options == {
        **config.policy_options, **result.best.candidate.options
    }  # fmt: skip
    assert config.temperature == 0 and config.max_num_seqs == 3
    ended = run_here(config=best, prompts=pair.prompts, output=tmp_path / "run", limit=2, max_new_tokens=8)
    assert ended.code == 0


def test_quantised_models_are_those_of_the_run(
    result: TuningResult, options: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    """The target's own tokens in 8 bits; a draft of the same 8 bits is the target, and accepted always."""
    kinds = {"target_quantization": "int8", "draft": "self:int8"}
    config = TuneConfig(**{**options, **kinds, "num_prompts": 3, "output": str(tmp_path)})
    trace, _ = collect_trace(config, [])
    assert {name: trace.origin[name] for name in kinds} == kinds
    llm = SpeculativeLLM(str(pair.target), device="cpu", target_quantization="int8")
    for found in trace.prompts:
        [wanted] = llm.generate(
            [found.prompt_ids.tolist()], SamplingOptions(temperature=0, max_new_tokens=16), use_tqdm=False
        )
        assert found.completion_ids.tolist() == list(wanted.token_ids)
        acceptance = found.acceptance_ND[np.isfinite(found.acceptance_ND)]
        assert len(acceptance) and (acceptance == 1).mean() > 0.98, acceptance
    (tmp_path / "best.yaml").write_text(best_yaml(dataclasses.replace(result, config=config)))
    run = parse_generate_config(["--config", str(tmp_path / "best.yaml"), "--prompts", "x", "--output", "x"])
    assert run.target_quantization == "int8"
    assert run.draft == ("self:int8" if run.uses_draft else None)


def test_it_leaves_a_plot_and_tables(result: TuningResult, options: dict[str, Any]) -> None:
    output = Path(options["output"])
    assert (output / "pareto.png").read_bytes().startswith(PNG)
    table = (output / "table.txt").read_text()
    assert all(policy in table for policy in (*(set(POLICIES) - set(HEAD_POLICIES)), "oracle", "none"))
    assert console_report(result).count("goodput") == 1
    assert json.loads(json.dumps(summary(result)))["policy"] == result.best.candidate.policy


def test_a_replay_of_what_was_collected_says_the_same(result: TuningResult, options: dict[str, Any]) -> None:
    again = run_tuning(TuneConfig(**{**options, "replay_only": True}))
    assert [each.candidate for each in again.outcomes] == [each.candidate for each in result.outcomes]
    assert again.best.batched == result.best.batched


def test_other_costs_choose_another_policy(
    result: TuningResult, options: dict[str, Any], tmp_path: Path
) -> None:
    """A draft as slow as its target is better left alone; one that costs nothing is not."""
    trace = Path(options["output"], "trace.arrow").read_bytes()
    found = []
    for draft_ns in (1, 1_000_000):
        output = tmp_path / str(draft_ns)
        output.mkdir()
        (output / "trace.arrow").write_bytes(trace)
        costs = CostModel(Curve([1, 101], [1_000_000, 1_000_100]), Curve([1], [draft_ns]))
        (output / COSTS_FILE).write_text(json.dumps(costs.to_json()))
        config = TuneConfig(**{**options, "output": str(output), "replay_only": True})
        found.append(run_tuning(config).best)
    assert found[0].candidate.policy != "none" and found[0].batched.tokens_per_round > 1
    assert found[1].batched.stats.num_draft_tokens == 0


def test_random_draws_are_the_targets_and_have_no_oracle(
    options: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    """The tokens come from the seed alone: lengths that follow measured times must not change them."""
    shared = {"temperature": 1.0, "model_impl": "transformers"}
    changed = {**shared, "num_prompts": 2, "max_draft_tokens": 2, "output": str(tmp_path)}
    assert run_tuning(TuneConfig(**{**options, **changed})).oracle is None
    plain = {name: options[name] for name in ("prompts", "target", "device", "max_new_tokens")}
    ended = run_here(**plain, **shared, policy="none", output=tmp_path / "run")
    assert ended.code == 0, ended.stderr
    own = [tuple(ids) for ids in read_output(tmp_path / "run")["completion_ids"].to_pylist()]
    for prompt in ExhaustiveTrace.read(tmp_path / TRACE_FILE).prompts:
        assert tuple(prompt.completion_ids) in own


def test_prompts_that_cannot_be_used_are_replaced_by_later_ones(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = write_arrow(tmp_path / "some.arrow", {"prompt": ["a " * 500, "a lazy dog", "", "a sea"]})
    changed = {
        "prompts": str(prompts),
        "num_prompts": 2,
        "max_draft_tokens": 2,
        "output": str(tmp_path / "o"),
    }
    assert run_tuning(TuneConfig(**{**options, **changed})).num_prompts == 2
    assert "row 0 is left out" in caplog.text and "row 2 is left out" in caplog.text
    empty = write_arrow(tmp_path / "none.arrow", {"prompt": ["", ""]})
    with pytest.raises(UserError, match="none of the prompts"):
        run_tuning(TuneConfig(**{**options, **changed, "prompts": str(empty)}))


def test_special_tokens_in_prompts_can_be_split(options: dict[str, Any], tmp_path: Path) -> None:
    """And what was traced with other tokens is not replayed."""
    prompts = write_arrow(tmp_path / "p.arrow", {"prompt": [f"a lazy {EOS_TOKEN} dog"]})
    changed = {**options, "prompts": str(prompts), "max_draft_tokens": 2, "max_new_tokens": 4}
    lengths = []
    for split in (False, True):
        output = tmp_path / str(split)
        run_tuning(TuneConfig(**{**changed, "split_special_tokens": split, "output": str(output)}))
        [prompt] = ExhaustiveTrace.read(output / TRACE_FILE).prompts
        lengths.append(len(prompt.prompt_ids))
    assert lengths[1] > lengths[0]
    with pytest.raises(UserError, match="--split_special_tokens False, but"):
        run_tuning(TuneConfig(**{**changed, "output": str(output), "replay_only": True}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_prompts": 0}, "--num_prompts 0 must be at least 1"),
        ({"max_draft_tokens": 0}, "--max_draft_tokens 0 must be at least 1"),
        ({"max_num_batched_tokens": 3}, "--max_num_batched_tokens 3 is less than"),
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"replay_only": True, "output": "nowhere"}, "not an exhaustive trace"),
    ],
)
def test_what_is_refused(options: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_tuning(TuneConfig(**{**options, **changed}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_draft_tokens": CAP + 3}, "--max_draft_tokens 9 is more than the 6"),
        ({"temperature": 0.5}, "--temperature 0.5, but .* was collected with 0.0"),
        ({"draft": "another"}, "--draft another, but"),
        ({"target_quantization": "int8"}, "--target_quantization int8, but .* was collected with None"),
    ],
)
def test_a_trace_of_something_else_is_refused(
    result: TuningResult, options: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_tuning(TuneConfig(**{**options, "replay_only": True, **changed}))


@pytest.fixture(scope="module")
def with_heads(options: dict[str, Any], pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> TuningResult:
    folder = tmp_path_factory.mktemp("heads")
    kinds = ("acceptance", "acceptance", "verifier")
    heads = [
        write_head(folder / f"head-{index}", kind, pair.draft, seed=index) for index, kind in enumerate(kinds)
    ]
    changed = {"head": [str(head) for head in heads], "output": str(folder / "out"), "num_prompts": 4}
    found = run_tuning(TuneConfig(**{**options, **changed}))
    write_report(found)
    return found


def test_every_head_is_tried_with_every_threshold(with_heads: TuningResult) -> None:
    tried = [
        (outcome.candidate.head.path, *outcome.candidate.options.values())
        for outcome in with_heads.outcomes
        if outcome.candidate.head is not None
    ]
    # The acceptance heads also with goodput, which has nothing to choose.
    assert len(set(tried)) == len(tried) == 3 * 9 + 2
    heads = summary(with_heads)["heads"]
    assert sorted(heads) == with_heads.config.head
    assert [heads[path]["kind"] for path in sorted(heads)] == ["acceptance", "acceptance", "verifier"]
    # Other heads stop elsewhere.
    first, second, _ = (with_heads.by_head()[path][1] for path in sorted(heads))
    assert {outcome.rates for outcome in first} != {outcome.rates for outcome in second}
    for path, figures in heads.items():
        assert 0 <= figures["auc"] <= 1 and path in console_report(with_heads)
    assert set(with_heads.auc) == {"entropy", "top_probability", "probability", *heads}
    table = (Path(with_heads.config.output) / "table.txt").read_text()
    assert table.count("sprinter") == 9 and table.count("specdecpp") == 18
    assert len(with_heads.by_policy()["goodput with head"]) == 2


def test_the_options_of_a_head_are_those_of_a_run(
    with_heads: TuningResult, pair: Pair, tmp_path: Path
) -> None:
    for name in ("specdecpp", "sprinter", "goodput with head"):
        policy = name.split()[0]
        best = dataclasses.replace(with_heads, outcomes=with_heads.by_policy()[name])
        outcomes = [*best.outcomes, *with_heads.by_policy()["none"]]
        (tmp_path / "best.yaml").write_text(best_yaml(dataclasses.replace(best, outcomes=outcomes)))
        config = parse_generate_config(
            ["--config", str(tmp_path / "best.yaml"), "--prompts", str(pair.prompts), "--output", "x"]
        )
        assert config.policy == policy and config.is_exact
        assert config.head == best.best.candidate.run_options["head"]


def test_a_trace_with_other_heads_is_refused(with_heads: TuningResult) -> None:
    config = with_heads.config
    again = dataclasses.replace(config, replay_only=True)
    assert run_tuning(again).best.batched == with_heads.best.batched
    with pytest.raises(UserError, match="--head"):
        run_tuning(dataclasses.replace(again, head=(config.head or [])[:1]))


@pytest.mark.parametrize("cap", [2, 4, 20, 30])
def test_the_grid_has_only_what_a_run_takes(options: dict[str, Any], cap: int) -> None:
    config = TuneConfig(**{**options, "max_draft_tokens": cap})
    found = list(candidates(cap))
    assert {candidate.policy for candidate in found} == {*POLICIES, "none"} - set(HEAD_POLICIES)
    for candidate in found:
        run = config.run_config(candidate.policy, **candidate.options)
        assert run.block_tokens - 1 <= cap


def test_the_grids_hold_the_defaults() -> None:
    """A default that is not tried could be better than what is chosen."""
    for policy, its_class in POLICIES.items():
        for name, values in its_class.grid.items():
            assert OPTIONS[policy][name].default in values, (policy, name)
