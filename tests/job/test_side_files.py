"""Files beside a model's weights that ask for something: an adapter, sampling settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdist.models.checkpoint import open_checkpoint
from specdist.models.generation import unused_settings
from tests.job.launching import refused, run_here
from tests.job.pair import Pair

USED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


@pytest.fixture
def folder(pair: Pair, tmp_path: Path) -> Path:
    shutil.copytree(pair.target, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("option", ["target", "draft"])
def test_an_adapter_is_refused_with_what_to_do(
    options: dict[str, Any], no_models: None, folder: Path, tmp_path: Path, option: str
) -> None:
    """transformers would ask for PEFT, or apply it in one process and leave it out of slices."""
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    ended = run_here(**(options | {option: folder}), output=tmp_path / "run")
    refused(
        ended, f"--{option} {folder}", "adapter_config.json", "merge_and_unload", "move adapter_config.json"
    )


def settings(folder: Path, used: dict[str, float], **asked: Any) -> str | None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | asked))
    return unused_settings(open_checkpoint("--target", str(folder)), used)


def test_settings_of_the_model_that_are_not_used_are_named(folder: Path) -> None:
    found = settings(folder, USED, temperature=0.6, top_p=0.9, top_k=0, repetition_penalty=1.05)
    assert found is not None and f"--target {folder}" in found
    assert "to use them, pass --temperature 0.6 --top_p 0.9" in found
    assert "nor repetition_penalty 1.05, which specdist does not have" in found and "top_k" not in found


def test_settings_that_are_used_or_change_nothing_are_not_named(folder: Path) -> None:
    assert settings(folder, USED) is None
    assert settings(folder, USED, temperature=1.0, top_p=1.0, repetition_penalty=1.0, min_p=None) is None
    assert settings(folder, USED | {"temperature": 0.6}, temperature=0.6) is None


def test_the_job_warns_of_them_once(options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    settings(folder, USED, temperature=0.6)
    ended = run_here(**(options | {"target": folder}), output=tmp_path / "run", limit=2)
    assert ended.code == 0 and ended.stderr.count("pass --temperature 0.6") == 1
