"""How a run reports the check of its loaded target: in the manifest, the log, the totals and the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from specdist.job.replica import loaded_models
from tests.job.launching import Ended, refused, run_here, shard_stats


def manifest_info(output: Path) -> dict[str, Any]:
    info: dict[str, Any] = json.loads((output / "manifest.json").read_text())["info"]
    return info


def test_a_run_says_what_was_compared(greedy: tuple[Path, Ended]) -> None:
    output, ended = greedy
    info = manifest_info(output)
    check = info["loading_check"]
    assert info["exact"] is True and check["is_checked"] is True
    assert check["layers"] == [0, 1] and check["last_position"] == 127
    assert 0 <= check["difference"] <= check["tolerance"] < 0.1
    assert "the loaded target matches its checkpoint: layers 0, 1 and the head agree" in ended.stderr


def test_a_target_that_is_not_the_one_in_the_files_ends_the_job(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check it would have generated fluent text and ended with 0."""
    load = loaded_models.load_whole

    def load_wrongly(checkpoint: Any, **where: Any) -> PreTrainedModel:
        model = load(checkpoint, **where)
        if checkpoint.option == "--target":
            weight = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
            weight.data = weight.data.roll(1, 0)
        return model

    monkeypatch.setattr(loaded_models, "load_whole", load_wrongly)
    output = tmp_path / "run"
    ended = run_here(**options, output=output)
    refused(ended, f"--target {options['target']}", "layer 1 keys differ by", "Nothing was generated")
    assert manifest_info(output)["exact"] is False and not shard_stats(output)
    monkeypatch.undo()
    again = run_here(**options, output=output)
    assert again.totals["exact"] is True and manifest_info(output)["loading_check"]["is_checked"]


def test_a_run_that_could_not_be_checked_does_not_say_that_it_is_exact(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object, **__: object) -> None:
        raise TypeError("got an unexpected keyword argument 'state_dict'")

    monkeypatch.setattr("specdist.models.start_check.loading_check.run_reference", cannot)
    output = tmp_path / "run"
    ended = run_here(**options, output=output)
    assert ended.totals["exact"] is False
    info = manifest_info(output)
    assert info["exact"] is False and "unexpected keyword" in info["loading_check"]["reason"]
    assert "NOT known to be exact" in ended.stderr and "unexpected keyword" in ended.stderr
    assert "is not known" in (output / "README.md").read_text()
    assert [stats["exact"] for stats in shard_stats(output)] == [False] * 3
    again = run_here(**options, output=output)
    assert "nothing to do" in again.stderr and "NOT known to be exact" in again.stderr
