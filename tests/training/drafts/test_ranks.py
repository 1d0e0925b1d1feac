"""Ranks that share a training end with the draft of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from specdist.cli import distill as main
from tests.job.launching import arguments, run_here
from tests.job.pair import Pair
from tests.ranks import run_ranks


def test_two_ranks_train_what_one_does(
    options: dict[str, Any], finished: Path, pair: Pair, tmp_path: Path
) -> None:
    """Up to rounding: the rows of a step, and those of evaluations, are dealt to them."""
    run = options | {"output": finished, "teacher": "target", "cost_ratio": 0.1, "epochs": 1}
    run |= {"batch_size": 30, "learning_rate": 1e-3}
    assert run_here(main, **run, new_draft=tmp_path / "one").code == 0
    run_ranks("tests.training.drafts.sharing", 2, *arguments(**run, new_draft=tmp_path / "two"))
    [one, two] = [json.loads((tmp_path / name / "distillation.json").read_text()) for name in ("one", "two")]
    assert one["after"]["acceptance"] > one["before"]["acceptance"]
    for name in ("before", "after"):
        assert abs(one[name]["acceptance"] - two[name]["acceptance"]) < 1e-5
    start = load_file(pair.draft / "model.safetensors")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for name, expected in weights[0].items():
        assert float((weights[1][name] - expected).norm()) < 1e-3 * float((expected - start[name]).norm()), (
            name
        )
