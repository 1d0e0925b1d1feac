"""A result as tables, and what of it is read back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from specdist.lab.benchmark.results import Hardware, ModelSizes, WorkSize
from specdist.lab.synthetic.build import SyntheticRecord
from specdist.utils.errors import UserError
from tests.lab.benchmark.overhead import PassOverhead
from tests.lab.benchmark.results import ComparedMethod, ComparisonResult, OverlapResult, PolicyResult
from tests.lab.benchmark.tables import console_report, markdown_report


def result(*, synthetic: bool = True, name: str = "transformers generate") -> ComparisonResult:
    record = SyntheticRecord(
        shape="5m",
        seed=0,
        dtype="float32",
        wanted_acceptance=0.8,
        epsilon=0.05,
        measured_acceptance=0.79,
        num_measured_tokens=100,
    )
    return ComparisonResult(
        command="python jobs/benchmark.py --some option",
        date="2024-01-02T03:04:05+00:00",
        hardware=Hardware(cpu="A CPU", num_cores=2, num_threads=2, gpu=None),
        versions={"torch": "9.9"},
        settings={"temperature": 0.0, "num_draft_tokens": 5, "repeats": 3},
        synthetic=record if synthetic else None,
        models=ModelSizes(
            target="T",
            draft="D",
            num_target_parameters=5_000_000,
            num_draft_parameters=1_000_000,
            dtype="float32",
        ),
        work=WorkSize(num_rows=4, shortest_prompt=1, longest_prompt=4, shortest_limit=2, longest_limit=8),
        methods=[
            ComparedMethod(
                name=name,
                batch_size=1,
                seconds=[1.0, 2.0, 3.0],
                num_tokens=[10, 10, 10],
                tokens_per_s=5.0,
                ratio_to_assisted=0.5,
                ratio_to_generate=1.0,
                num_rows_differing=0,
                statistics=None,
            ),
            ComparedMethod(
                name="specdist, K = 5, asynchronous, 2 branches",
                batch_size=1,
                seconds=[0.5],
                num_tokens=[10],
                tokens_per_s=20.0,
                ratio_to_assisted=2.0,
                ratio_to_generate=4.0,
                num_rows_differing=0,
                statistics=None,
                overlap=OverlapResult(
                    ratio_to_separate=1.25,
                    num_branches=2,
                    tokens_per_row_pass=3.5,
                    acceptance=0.8,
                    ready_share=0.61,
                    predicted_ready_share=0.62,
                    num_hits_per_rank=[7, 2],
                    miss_catch_rate=0.45,
                    target_idle_share=0.1,
                    draft_idle_share=0.2,
                ),
            ),
        ],
        overhead=[
            PassOverhead(
                batch_size=1,
                num_new_tokens=1,
                num_context_tokens=64,
                specdist_s=0.002,
                transformers_s=0.001,
                ratio=2.0,
                num_passes=20,
            )
        ],
    )


def written(tmp_path: Path, name: str, value: ComparisonResult) -> Path:
    path = tmp_path / name
    value.write(path)
    return path


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert ComparisonResult.read(written(tmp_path, "a.json", result())) == result()


def test_a_section_says_what_was_measured_where_and_how() -> None:
    text = markdown_report(result())
    for needed in ("A CPU", "torch 9.9", "2024-01-02", "python jobs/benchmark.py --some option", "| 2.00 |"):
        assert needed in text


def test_the_placements_of_the_draft_have_a_table_of_their_own() -> None:
    name, numbers = "K = 5, asynchronous, 2 branches", "1.25 | 3.50 | 0.61 | 0.62 | 0.45 | 7 2 | 0.10 | 0.20"
    assert f"| {name} | 1 | 20.0 | {numbers} |" in markdown_report(result())


def test_a_brief_section_has_only_the_first_table() -> None:
    text = markdown_report(result(), is_brief=True)
    assert text.count("| ---") < 20 and "| 20.0 | 2.00 | 4.00 |" in text and "| 0.61 |" not in text
    assert "x assisted: tokens/s" in text and "python jobs/benchmark.py --some option" in text
    assert "| 0.61 |" in markdown_report(result())


def test_results_from_before_the_separate_placement_are_still_read(tmp_path: Path) -> None:
    document = json.loads(written(tmp_path, "a.json", result()).read_text())
    del document["costs"]
    for method in document["methods"]:
        del method["overlap"]
    (tmp_path / "a.json").write_text(json.dumps(document))
    assert "x separate" not in console_report(ComparisonResult.read(tmp_path / "a.json"))


def test_a_synthetic_pair_is_called_synthetic() -> None:
    text = markdown_report(result())
    assert "Synthetic pair 5m of random weights" in text and "measured greedy acceptance 0.79" in text
    assert "ynthetic" not in markdown_report(result(synthetic=False))


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "other"}', '{"kind": "specdist benchmark"}'])
def test_other_files_are_refused_as_results(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"bad\.json"):
        ComparisonResult.read(path)
    with pytest.raises(UserError, match=r"missing\.json cannot be read"):
        ComparisonResult.read(tmp_path / "missing.json")


def test_every_field_of_a_method_is_in_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", result())
    for field in dataclasses.fields(ComparedMethod):
        assert f'"{field.name}"' in path.read_text()


@pytest.mark.parametrize(
    ("gpu", "num_threads", "shown"), [(None, 2, "4.00"), (None, 1, "2.00"), ("A GPU", 8, "2.00")]
)
def test_a_draft_with_a_device_of_its_own_is_compared_per_device(
    gpu: str | None, num_threads: int, shown: str
) -> None:
    """Where target and draft share the threads, it has none more."""
    plain = result()
    policy = PolicyResult(family="fixed", first_length=5, placement="asynchronous", num_branches=2)
    found = dataclasses.replace(
        plain,
        hardware=Hardware(cpu="A CPU", num_cores=2, num_threads=num_threads, gpu=gpu),
        methods=[plain.methods[0], dataclasses.replace(plain.methods[1], policy=policy)],
    )
    text = markdown_report(found)
    assert (
        f"| specdist, K = 5, asynchronous, 2 branches | 1 | 20.0 | {float(shown) / 2:.2f} | {shown} |" in text
    )
    assert "| transformers generate | 1 | 5.0 | 0.50 | 1.00 |" in text
    assert ("are per GPU or core" in text) == (shown == "2.00")
