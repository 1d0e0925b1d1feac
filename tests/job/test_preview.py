"""``--preview``: the first rows of a run, printed, and not a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdist.data.stats.regression import NS_PER_S
from specdist.data.stats.shard import Stats
from specdist.engine.request import Request
from specdist.job.preview import of_all, prompt_line
from specdist.job.run.workload import Workload
from specdist.job.texts.tokens import detokenizer_of
from specdist.policies.costs import CostModel, Curve
from tests.job.launching import Ended, parse, read_output, refused, run_here
from tests.job.pair import train_tokenizer, write_arrow
from tests.job.ranks import fork_ranks

COLUMNS = ["row_id", "prompt", "completion", "completion_ids", "finish_reason", "error", "num_prompt_tokens",
           "num_completion_tokens"]  # fmt: skip


def check(ended: Ended, output: Path, num_rows: int, folder: Path) -> None:
    """What is printed is what the run has written, byte for byte."""
    expected = read_output(output).select(COLUMNS).to_pylist()[:num_rows]
    assert [{name: row[name] for name in COLUMNS} for row in ended.totals["rows"]] == expected
    assert list(folder.rglob("*")) == []


@pytest.mark.ranks
def test_a_preview_prints_what_a_run_writes_and_leaves_no_file(
    options: dict[str, Any], greedy: tuple[Path, Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a policy without costs, which are then measured for the estimate; also on two ranks, with costs."""
    monkeypatch.chdir(tmp_path)
    ended = run_here(**options, preview=5, gpu_price=2)
    check(ended, greedy[0], 5, tmp_path)
    assert all(text in ended.stdout for text in read_output(greedy[0])["completion"].to_pylist()[:5])
    assert "all rows    about 0:00:" in ended.stdout and "24 completions of" in ended.stdout
    assert "prompt      row 0, " in greedy[1].stderr
    auto = options | {"policy": "goodput", "overlap": "auto", "preview": 30}
    check(fork_ranks(2, **auto), greedy[0], 24, tmp_path)


def test_a_preview_answers_every_turn(options: dict[str, Any], tmp_path: Path) -> None:
    """Alone it notices a turn that is never asked; a row without turns has its error."""
    rows = {"turns": [["a fox", "and then"], [], ["seven wizards", "why", "so"]]}
    run = options | {"prompts": write_arrow(tmp_path / "a.arrow", rows), "turns_column": "turns"}
    assert run_here(**run, output=tmp_path / "run").code == 0
    found, expected = run_here(**run, preview=3).totals["rows"], read_output(tmp_path / "run").to_pylist()
    for name in ("completion", "turn_completions", "error"):
        assert [row[name] for row in found] == [row[name] for row in expected]


def test_all_rows_take_what_measured_costs_say_of_a_whole_batch() -> None:
    """Passes that take as long for 8 sequences as for 2: 100 tokens/s become 400, in units by hand."""
    costs = CostModel(target=Curve([1, 64], [1000, 1000]), draft=Curve([1], [0]))
    plan: Any = SimpleNamespace(config=parse(prompts="p", target="t", preview=4, gpu_price=3))
    plan.workload, plan.is_asynchronous = Workload(num_rows=3600), False
    plan.topology = SimpleNamespace(world_size=2)
    replica: Any = SimpleNamespace(costs=costs, num_slots=8)
    stats = Stats(num_completions=4, num_completion_tokens=400, num_rounds=200, num_row_steps=400)
    stats.wall_ns = 4 * NS_PER_S
    text = of_all(stats, plan, replica)
    for said in (
        "100.0 tokens/s, about 2 of",
        "0:15:00",
        "for 1.5 at --gpu_price 3",
        "3,600 completions of 100",
    ):
        assert said in text
    assert "at 400.0 tokens/s" in text and "to 8 sequences" in text
    assert "unknown" in of_all(Stats(), plan, replica)


def test_a_prompt_is_shown_with_its_special_tokens_and_cut_to_a_screen() -> None:
    tokenizer = train_tokenizer()
    ids = [0, *tokenizer("the fox\n" * 200)["input_ids"], 0]
    line = prompt_line(Request(row_id=3, sample_index=0, prompt_ids=ids), detokenizer_of(tokenizer))
    assert line.startswith(f"prompt      row 3, {len(ids):,} tokens: '<|end|>the fox\\n")
    assert line.endswith("fox\\n<|end|>'") and len(line) < 550


@pytest.mark.usefixtures("no_models")
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(options: dict[str, Any]) -> None:
    refused(run_here(**options, preview=0), "--preview 0 must be at least 1")
    refused(
        run_here(**options, preview=3, push_to_hub="a/b"), "--push_to_hub a/b has no effect with --preview"
    )
    refused(run_here(**options), "--output must be given", "--preview 3")
