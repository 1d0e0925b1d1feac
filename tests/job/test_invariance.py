"""A completion depends on its row, the seed and the settings, not on how the run is sharded or batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdist.cli import generate
from specdist.config.seeds import SEED_FIXES, WHEN_TOKENS
from specdist.policies.costs import CostModel, Curve
from specdist.results.report import write_report
from tests.job.launching import Ended, read_output, run_here, shard_bytes, shard_stats
from tests.job.pair import NUM_PROMPTS
from tests.ranks import REPOSITORY

SAMPLED = {"temperature": 1, "top_p": 0.95, "seed": 3}


@pytest.fixture(scope="module")
def sampled(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("sampled") / "run"
    assert run_here(**(options | SAMPLED), output=output).code == 0
    return output


def total(output: Path, name: str) -> int:
    return sum(shard[name] for shard in shard_stats(output))


def test_files_do_not_depend_on_the_batch(options: dict[str, Any], sampled: Path, tmp_path: Path) -> None:
    """Prompts in chunks of a few tokens: the same bytes."""
    packing = {"max_num_batched_tokens": 8, "max_num_seqs": 7}
    assert run_here(**(options | SAMPLED | packing), output=tmp_path / "run").code == 0
    assert shard_bytes(tmp_path / "run") == shard_bytes(sampled)


def test_rows_do_not_depend_on_the_shards_or_on_later_rows(
    options: dict[str, Any], sampled: Path, tmp_path: Path
) -> None:
    """Random numbers are keyed by the row's number in the run, never by its place in a shard. ``--limit``
    gives the first rows of the whole run."""
    changed = options | SAMPLED | {"rows_per_shard": 7, "limit": 20}
    assert run_here(**changed, output=tmp_path / "run").code == 0
    assert len(shard_bytes(tmp_path / "run")) == 3
    assert read_output(tmp_path / "run").equals(read_output(sampled).slice(0, 20))


def test_files_do_not_depend_on_preemption(options: dict[str, Any], tmp_path: Path) -> None:
    """A row that loses its pages starts its last block over, with the same random numbers."""
    options = options | SAMPLED | {"max_new_tokens": 90, "limit": 10}
    assert run_here(**options, output=tmp_path / "roomy").code == 0
    assert total(tmp_path / "roomy", "num_preemptions") == 0
    # 16 pages of 16 tokens for both models; a row can need eight.
    assert run_here(**options, cache_memory="256KiB", output=tmp_path / "cramped").code == 0
    assert total(tmp_path / "cramped", "num_preemptions") > 0
    assert shard_bytes(tmp_path / "cramped") == shard_bytes(tmp_path / "roomy")


def test_samples_of_a_row_differ_and_share_its_prompt(
    options: dict[str, Any], sampled: Path, tmp_path: Path
) -> None:
    """The first sample is that of a run with one; the others differ, and their prompt is not run again."""
    output = tmp_path / "run"
    assert run_here(**(options | SAMPLED), num_samples=3, output=output).code == 0
    rows = read_output(output).to_pylist()
    assert [(row["row_id"], row["sample_index"]) for row in rows] == [
        (row_id, sample) for row_id in range(NUM_PROMPTS) for sample in range(3)
    ]
    assert rows[::3] == read_output(sampled).to_pylist()
    completions = {(row["row_id"], *row["completion_ids"]) for row in rows}
    assert len(completions) == 3 * NUM_PROMPTS
    # Each of the two other samples finds every page of 16 tokens that is full before the last token.
    sharable = sum((row["num_prompt_tokens"] - 1) // 16 * 16 for row in rows if row["sample_index"] > 0)
    assert total(output, "num_shared_prompt_tokens") >= sharable > 0


def test_seeds_give_other_samples(options: dict[str, Any], sampled: Path, tmp_path: Path) -> None:
    """The seed reaches every draw: no row keeps its completion."""
    assert run_here(**(options | SAMPLED | {"seed": 4}), output=tmp_path / "run").code == 0
    before, after = read_output(sampled), read_output(tmp_path / "run")
    pairs = zip(before["completion_ids"].to_pylist(), after["completion_ids"].to_pylist(), strict=True)
    assert all(one != other for one, other in pairs)


@pytest.mark.parametrize("settings", [{"draft": None}, {"num_draft_tokens": 9}])
def test_greedy_text_does_not_depend_on_speculation(
    options: dict[str, Any], greedy: tuple[Path, Ended], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Speculation is exact: what the draft does changes the speed alone."""
    assert run_here(**(options | settings), output=tmp_path / "run").code == 0
    rows, expected = read_output(tmp_path / "run"), read_output(greedy[0])
    assert rows["completion_ids"].to_pylist() == expected["completion_ids"].to_pylist()
    assert rows["finish_reason"].to_pylist() == expected["finish_reason"].to_pylist()
    assert (total(tmp_path / "run", "num_drafts") > 0) == ("draft" not in settings)


def test_help_start_card_report_and_manual_say_what_the_seed_fixes_and_it_does(
    options: dict[str, Any],
    sampled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Alone it notices a sentence on seeds that is not from the one place, or not so. What a seed fixes of a
    run with blocks of a fixed length, whose card says so, is tested above."""
    assert SEED_FIXES["tokens"] in (sampled / "README.md").read_text()
    costs = CostModel(Curve([1, 1000], [20_000_000, 30_000_000]), Curve([1, 1000], [1_000_000] * 2))
    monkeypatch.setattr("specdist.job.replica.replica.measure_costs", lambda *_, **__: costs)
    monkeypatch.setattr("specdist.job.replica.replica.rehearsed_costs", lambda given, *_: given)
    said, rows = SEED_FIXES["distribution"], []
    for num_seqs in (2, 24):
        output = tmp_path / str(num_seqs)
        own = {"policy": "goodput", "max_num_seqs": num_seqs, "limit": 12, "output": output}
        assert f"--seed 3: {said}\n" in run_here(**options | SAMPLED | own).stderr
        assert said in (output / "README.md").read_text()
        rows.append(read_output(output)["completion_ids"].to_pylist())
    assert rows[0] != rows[1]
    assert said in write_report([tmp_path / "2"]).page.read_text()
    with pytest.raises(SystemExit):
        generate(["--help", "all"])
    for text in (capsys.readouterr().out, (REPOSITORY / "README.md").read_text()):
        assert WHEN_TOKENS in " ".join(text.replace("`", "").split())
