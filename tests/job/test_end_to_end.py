"""The job as users start it, in one process and on several ranks: the same files, as documented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.job.given_costs import generate_with_long_passes
from tests.job.launching import (
    Ended,
    read_output,
    run_here,
    shard_bytes,
    shard_files,
    shard_stats,
)
from tests.job.pair import NUM_PROMPTS, Pair
from tests.job.ranks import fork_ranks

# Sums in another order move the borders between tokens; a sharded target has the layers of transformers.
SAMPLED = {"temperature": 1, "top_p": 0.9, "top_k": 50, "seed": 7, "model_impl": "transformers"}
COLUMNS = {
    "row_id": pa.int64(),
    "sample_index": pa.int32(),
    "prompt": pa.string(),
    "completion": pa.string(),
    "completion_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),
    "error": pa.string(),
    "num_prompt_tokens": pa.int32(),
    "num_completion_tokens": pa.int32(),
    "num_spec_steps": pa.int32(),
    "num_draft_tokens": pa.int32(),
    "num_accepted_draft_tokens": pa.int32(),
    "mean_acceptance_length": pa.float64(),
    "reference": pa.string(),
}


@pytest.fixture(scope="module")
def sampled(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    output = tmp_path_factory.mktemp("sampled") / "run"
    return output, run_here(**(options | SAMPLED), output=output)


def test_the_fixture_exercises_speculation(greedy: tuple[Path, Ended], sampled: tuple[Path, Ended]) -> None:
    """Other tests would pass by accident if the draft were always right or wrong, or all rows equal."""
    for output, ended in (greedy, sampled):
        assert 0.3 < ended.totals["draft_acceptance_rate"] < 0.9
        rows = read_output(output)
        assert set(rows["finish_reason"].to_pylist()) == {"stop", "length"}
        completions = rows["completion_ids"].to_pylist()
        assert all(len(set(ids)) > len(ids) / 2 for ids in completions)


def test_output_has_the_documented_columns_and_rows_in_input_order(
    pair: Pair, greedy: tuple[Path, Ended]
) -> None:
    """Evaluation reads these names and types, and joins on the input's own columns."""
    output, _ = greedy
    rows = read_output(output)
    assert dict(zip(rows.schema.names, rows.schema.types, strict=True)) == COLUMNS
    assert rows["row_id"].to_pylist() == list(range(NUM_PROMPTS))
    given = pa.ipc.open_file(pa.OSFile(str(pair.prompts))).read_all()
    for name in given.column_names:
        assert rows[name].to_pylist() == given[name].to_pylist()
    assert [pa.ipc.open_file(path).read_all().num_rows for path in shard_files(output)] == [10, 10, 4]
    for row in rows.to_pylist():
        assert row["num_completion_tokens"] == len(row["completion_ids"])
        assert row["mean_acceptance_length"] == 1 + row["num_accepted_draft_tokens"] / row["num_spec_steps"]
    assert not list((output / "parts").iterdir())


def test_totals_are_the_sum_of_the_shards_and_of_the_rows(sampled: tuple[Path, Ended]) -> None:
    """Statistics that do not add up to what the rows say would go unnoticed anywhere else."""
    output, ended = sampled
    shards, rows, totals = shard_stats(output), read_output(output), ended.totals

    def total(name: str) -> int:
        return sum(shard[name] for shard in shards)

    for name in ("num_rows", "num_completions", "num_error_rows", "num_completion_tokens"):
        assert totals[name] == total(name)
    assert totals["num_rows"] == NUM_PROMPTS
    for name in ("num_prompt_tokens", "num_completion_tokens", "num_draft_tokens"):
        assert total(name) == sum(rows[name].to_pylist())
    assert total("num_accepted_tokens") == sum(rows["num_accepted_draft_tokens"].to_pylist())
    assert total("num_drafts") == sum(rows["num_spec_steps"].to_pylist())
    assert totals["draft_acceptance_rate"] == total("num_accepted_tokens") / total("num_draft_tokens")
    assert totals["wall_s"] == total("wall_ns") / 1e9
    assert totals["tokens_per_s"] == pytest.approx(total("num_completion_tokens") / totals["wall_s"])
    assert all(shard["wall_ns"] > 0 for shard in shards)


def test_greedy_output_is_that_of_transformers(pair: Pair, greedy: tuple[Path, Ended]) -> None:
    """The whole chain from text to text against the library that users would compare with."""
    model = AutoModelForCausalLM.from_pretrained(pair.target)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    for row in read_output(greedy[0]).to_pylist():
        prompt_ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output_ids = model.generate(prompt_ids, do_sample=False, max_new_tokens=32)
        completion_ids = output_ids[0, prompt_ids.shape[1] :].tolist()
        assert row["completion_ids"] == completion_ids
        assert row["completion"] == tokenizer.decode(completion_ids, skip_special_tokens=True)


@pytest.mark.ranks
def test_ranks_write_the_files_of_one_process(
    options: dict[str, Any], sampled: tuple[Path, Ended], tmp_path: Path
) -> None:
    """A sharded target, and a draft beside its first part, change the speed, and no byte of the output."""
    output, alone = sampled
    ended = fork_ranks(2, **(options | SAMPLED), tp_size=2, output=tmp_path / "run")
    assert ended.totals["num_completion_tokens"] == alone.totals["num_completion_tokens"]
    assert shard_bytes(tmp_path / "run") == shard_bytes(output)
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert [name[name.index("rank-") :] for name in logs] == ["rank-0.log", "rank-1.log"]
    assert ended.totals["tokens_per_s_per_device"] == pytest.approx(ended.totals["tokens_per_s"] / 2)
    assert ended.totals["draft_placement"] == "shared"
    assert "2 ranks on cpu; the draft shares rank 0 with the target" in ended.stderr


@pytest.mark.ranks
def test_drafting_ahead_writes_the_completions_of_the_target_alone(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Coupled, on ranks of their own, with the draft drafting on while the target verifies."""
    options = options | SAMPLED | {"acceptance": "gumbel"}
    alone, ahead = tmp_path / "alone", tmp_path / "asynchronous"
    assert run_here(**(options | {"draft": None}), output=alone).code == 0
    options |= {"tp_size": 2, "overlap": "asynchronous", "num_branches": 2}
    ended = fork_ranks(3, generate_with_long_passes, **options, output=ahead)
    assert ended.totals["draft_placement"] == "own"
    assert "3 ranks on cpu; the draft has a rank of its own" in ended.stderr
    assert ended.totals["ready_rate"] > 0.1
    assert ended.totals["miss_catch_rate"] > 0.05
    assert read_output(ahead)["completion_ids"] == read_output(alone)["completion_ids"]
