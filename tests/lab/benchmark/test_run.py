"""The whole benchmark on a tiny pair, and that all methods do the same work."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.benchmark.config import ComparisonConfig
from tests.lab.benchmark.conftest import RunJob, run_benchmark_job
from tests.lab.benchmark.results import ComparisonResult
from tests.lab.benchmark.run import run_comparison
from tests.lab.benchmark.setting import ComparedSetting

NAMES = {
    ("transformers assisted", 1),
    ("transformers generate", 1),
    ("transformers generate", 3),
    ("specdist, target only", 1),
    ("specdist, target only", 3),
    ("specdist, K = 3", 1),
    ("specdist, K = 3", 3),
}


@pytest.fixture(scope="module")
def job(tiny_shape: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a finished run, and its stdout."""
    folder = tmp_path_factory.mktemp("benchmark")
    with contextlib.chdir(folder):
        stdout = run_benchmark_job(
            *("--synthetic", "tiny", "--epsilon", "0.05", "--synthetic_folder", "pairs"),
            *("--repeats", "1", "--batch_sizes", "1", "3", "--num_prompts", "4", "--num_draft_tokens", "3"),
            *("--max_prompt_tokens", "12", "--max_new_tokens", "12", "--output", "out/r.json"),
        )
    return folder, stdout


@pytest.fixture(scope="module")
def document(job: tuple[Path, str]) -> dict[str, Any]:
    return json.loads((job[0] / "out" / "r.json").read_text())


def test_the_file_says_what_was_measured_and_where(document: dict[str, Any]) -> None:
    assert document["command"].startswith("python jobs/benchmark.py --synthetic tiny --epsilon 0.05")
    assert document["hardware"]["num_threads"] >= 1
    assert document["hardware"]["cpu"]
    assert {"python", "specdist", "torch", "transformers"} <= document["versions"].keys()
    assert document["settings"]["num_draft_tokens"] == 3
    assert document["synthetic"]["synthetic"] is True
    assert document["synthetic"]["epsilon"] == 0.05
    assert document["models"]["dtype"] == "float32"
    assert document["work"]["num_rows"] == 4
    assert document["date"].endswith("+00:00")


def test_every_method_generated_the_same_useful_tokens(document: dict[str, Any]) -> None:
    methods = document["methods"]
    assert {(method["name"], method["batch_size"]) for method in methods} == NAMES
    # Rows have limits of their own and nothing ends them earlier, so all methods keep equally many tokens.
    assert len({tuple(method["num_tokens"]) for method in methods}) == 1
    assert document["work"]["shortest_limit"] < document["work"]["longest_limit"] <= 12
    for method in methods:
        assert len(method["seconds"]) == 1
        assert method["tokens_per_s"] == method["num_tokens"][0] / method["seconds"][0] > 0
        # float32, a random model of peaked logits and 36 tokens: no near-tie among them.
        assert method["num_rows_differing"] == 0
        assert method["ratio_to_assisted"] > 0
        assert method["ratio_to_generate"] > 0
        is_drafting = method["name"].startswith("specdist, K = 3")
        assert bool((method["statistics"] or {}).get("draft_acceptance_rate")) == is_drafting
    assert document["costs"] == {}


def test_stdout_ends_with_one_json_document(job: tuple[Path, str]) -> None:
    folder, stdout = job
    last = json.loads(stdout.strip().splitlines()[-1])
    assert last["synthetic"] is True
    assert last["output"] == "out/r.json"
    assert len(last["tokens_per_s"]) == len(NAMES)
    assert "Synthetic pair tiny of random weights" in stdout
    assert "\nspecdist, K = 3" in stdout
    assert ComparisonResult.read(folder / "out" / "r.json").synthetic is not None


def test_a_trained_pair_is_measured_on_given_prompts_with_sampling(
    setting: ComparedSetting, run_job: RunJob, tmp_path: Path
) -> None:
    prompts = [{"prompt": text} for text in ("one", "two and a bit", "three is the longest of all")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    pair = setting.pair
    stdout = run_job(
        *("--target", str(pair.target_checkpoint.folder), "--draft", str(pair.draft_checkpoint.folder)),
        *("--output", "r.json", "--repeats", "1", "--batch_sizes", "2", "--max_new_tokens", "6"),
        *("--temperature", "1", "--dtype", "bfloat16", "--prompts", "p.jsonl"),
        *("--top_k", "20", "--top_p", "0.9"),
    )
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["synthetic"] is None
    assert document["models"]["dtype"] == "bfloat16"
    assert "temperature 1, top_k 20, top_p 0.9" in stdout
    assert document["work"]["longest_prompt"] == len("three is the longest of all")
    assert {method["num_rows_differing"] for method in document["methods"]} == {None}
    assert "ynthetic" not in stdout.replace('"synthetic": false', "")


def test_a_mistake_of_the_user_is_reported_in_one_line(
    run_job: RunJob, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_job("--synthetic", "tiny", "--epsilon", "0.05")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --output must be given")


@pytest.mark.ranks
def test_a_comparison_also_runs_the_draft_in_a_process_of_its_own(
    setting: ComparedSetting, tmp_path: Path
) -> None:
    """The same tokens in every way; and single passes are timed beside those of transformers."""
    config = ComparisonConfig(
        output=str(tmp_path / "r.json"), synthetic="tiny", epsilon=0.05, synthetic_folder=str(tmp_path),
        num_prompts=4, max_prompt_tokens=12, max_new_tokens=12, num_draft_tokens=3, batch_sizes=[1, 3],
        repeats=1, overhead_repeats=2, placements=["colocated", "separate"], num_branches=2, device="cpu",
    )  # fmt: skip
    found = run_comparison(config, "python -m tests.lab.benchmark")
    ways = ("separate", "asynchronous", "asynchronous, 2 branches")
    assert {(method.name, method.batch_size) for method in found.methods} == NAMES | {
        (f"specdist, K = 3, {way}", size) for way in ways for size in (1, 3)
    }
    assert {method.num_rows_differing for method in found.methods} == {0}
    apart = [method for method in found.methods if method.policy is not None]
    assert all(method.overlap and (method.overlap.ratio_to_separate or 0) > 0 for method in apart)
    assert all(method.overlap is None for method in found.methods if method not in apart)
    # How far a draft works ahead follows from measured times, here of models too small to have any to spare.
    synchronous = [method for method in apart if method.name == "specdist, K = 3, separate"]
    assert [method.overlap and method.overlap.ratio_to_separate for method in synchronous] == [1, 1]
    assert all((method.statistic("draft_acceptance_rate") or 0) > 0 for method in synchronous)
    assert found.costs.keys() == {"separate, batch 1", "separate, batch 3"}
    cases = {(item.batch_size, item.num_new_tokens) for item in found.overhead}
    assert cases == {(1, 1), (1, 4), (8, 1), (8, 4)}
    assert all(item.num_passes == 2 and item.ratio > 0 for item in found.overhead)
