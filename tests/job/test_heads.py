"""Runs whose policy reads a trained head: refusals, lossy runs, resuming, and several ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.ipc
import pytest
from datasets import load_dataset

from specdist.data.stats.rows import EXACT_METADATA
from tests.job.heads import write_head
from tests.job.launching import (
    Ended,
    read_output,
    refused,
    run_here,
    shard_files,
    shard_stats,
)
from tests.job.pair import Pair
from tests.job.ranks import fork_ranks

SAMPLED = {"temperature": 1, "top_k": 40, "seed": 3}


@pytest.fixture(scope="module")
def lossy(options: dict[str, Any], heads: dict[str, Path]) -> dict[str, Any]:
    return options | SAMPLED | {"policy": "sprinter", "head": heads["sprinter"]}


@pytest.fixture(scope="module")
def lossy_run(lossy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    output = tmp_path_factory.mktemp("lossy") / "run"
    return output, run_here(**lossy, output=output)


@pytest.mark.usefixtures("no_models")
def test_a_head_that_does_not_fit_is_refused_before_a_model_is_loaded(
    options: dict[str, Any], heads: dict[str, Path], pair: Pair, tmp_path: Path
) -> None:
    output = tmp_path / "run"

    def refusal(**changes: Any) -> str:
        return refused(run_here(**(options | changes), output=output))

    acceptance, verifier = heads["specdecpp"], heads["sprinter"]
    assert "--head" in refusal(policy="specdecpp") and "jobs/train_head.py" in refusal(policy="sprinter")
    assert "kind verifier" in refusal(policy="specdecpp", head=verifier)
    assert "kind acceptance" in refusal(policy="sprinter", head=acceptance)
    assert "has no effect with --policy goodput" in refusal(policy="goodput", head=acceptance)
    assert "other weights" in refusal(policy="specdecpp", head=acceptance, draft=pair.target)
    assert "is not a head" in refusal(policy="specdecpp", head=tmp_path / "nothing")
    broken = tmp_path / "broken"
    shutil.copytree(acceptance, broken)
    with (broken / "head.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert "SHA-256" in refusal(policy="specdecpp", head=broken)
    assert not output.exists()


def test_a_lossy_run_says_so_everywhere(lossy_run: tuple[Path, Ended]) -> None:
    output, ended = lossy_run
    totals = ended.totals
    assert totals["exact"] is False and totals["num_trusted_tokens"] > 100
    # At the start, with the remedy and in its summary, and at the end.
    assert ended.stderr.count("NOT exact") == 3
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["info"]["exact"] is False and manifest["info"]["head"]["kind"] == "verifier"
    assert [shard["exact"] for shard in shard_stats(output)] == [False] * 3
    for path in shard_files(output):
        assert pyarrow.ipc.open_file(path).schema.metadata[EXACT_METADATA] == b"false"
    rows = load_dataset("arrow", data_files=[str(path) for path in shard_files(output)], split="train")
    assert rows.num_rows == read_output(output).num_rows


def test_a_verifier_that_only_says_when_to_stop_changes_no_greedy_token(
    options: dict[str, Any], heads: dict[str, Path], greedy: tuple[Path, Ended], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    common = options | {"policy": "sprinter", "head": heads["sprinter"]}
    ended = run_here(**common, verify="all", output=output)
    assert ended.totals["exact"] is True and ended.totals["num_trusted_tokens"] == 0
    found, expected = read_output(output), read_output(greedy[0])
    assert found["completion_ids"].equals(expected["completion_ids"])
    message = refused(run_here(**common, output=output))
    assert 'verify: "all" in --output, "doubted" now' in message


def test_a_run_continues_only_with_its_own_head(
    lossy: dict[str, Any], lossy_run: tuple[Path, Ended], pair: Pair, tmp_path: Path
) -> None:
    output = lossy_run[0]
    again = run_here(config=output / "config.yaml")
    assert "nothing to do" in again.stderr and "NOT exact" in again.stderr
    moved = tmp_path / "moved"
    shutil.copytree(lossy["head"], moved)
    assert "nothing to do" in run_here(**(lossy | {"head": moved}), output=output).stderr
    other = write_head(tmp_path / "other", "verifier", pair.draft, seed=6)
    refused(run_here(**(lossy | {"head": other}), output=output), "head: ")


@pytest.mark.ranks
def test_ranks_emit_what_one_process_does(
    lossy: dict[str, Any], lossy_run: tuple[Path, Ended], tmp_path: Path
) -> None:
    """The draft with its head on a rank of its own."""
    ended = fork_ranks(2, **lossy, output=tmp_path / "ranks")
    assert ended.totals["exact"] is False
    found, expected = read_output(tmp_path / "ranks"), read_output(lossy_run[0])
    assert found["completion_ids"].equals(expected["completion_ids"])
    assert found["num_draft_tokens"].equals(expected["num_draft_tokens"])
