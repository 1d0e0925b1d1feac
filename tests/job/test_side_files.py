"""Files beside a model's weights that ask for something: an adapter, sampling settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdist.data.run.run_folder import RunFolder
from specdist.models.files.checkpoint import Checkpoint, open_checkpoint
from specdist.models.files.generation import default_options, unused_settings
from tests.job.launching import refused, run_here
from tests.job.pair import Pair

USED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


@pytest.fixture
def folder(pair: Pair, tmp_path: Path) -> Path:
    shutil.copytree(pair.target, tmp_path / "model")
    return tmp_path / "model"


def test_an_adapter_is_refused_with_what_to_do(
    options: dict[str, Any], no_models: None, folder: Path, tmp_path: Path
) -> None:
    """transformers would ask for PEFT, or apply it in one process and leave it out of slices."""
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    ended = run_here(**(options | {"draft": folder}), output=tmp_path / "run")
    refused(ended, f"--draft {folder}", "draft_adapter", "merge_and_unload", "move adapter_config.json")


def ask_for(folder: Path, **asked: Any) -> Checkpoint:
    """A model whose generation_config.json has these settings, too."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | asked))
    return open_checkpoint("--target", str(folder))


def settings(folder: Path, used: dict[str, float] | None, **asked: Any) -> str | None:
    return unused_settings(ask_for(folder, **asked), used)


def test_settings_of_the_model_that_are_not_used_are_named(folder: Path) -> None:
    found = settings(folder, USED, temperature=0.6, top_p=0.9, top_k=0, typical_p=0.5)
    assert found is not None and f"--target {folder}" in found
    assert "to use them, pass --temperature 0.6 --top_p 0.9" in found
    assert ", or --generation_config model, and cannot use typical_p 0.5, which" in found
    assert "top_k" not in found
    found = settings(folder, USED, suppress_tokens=[7, 9], bad_words_ids=[[3]], typical_p=None)
    assert found is not None and "--suppress_tokens 7 9" in found
    assert (
        "cannot use bad_words_ids [[3]], which specdist does not support (give the words with --bad_words)"
        in found
    )


def test_settings_of_the_file_are_defaults_by_the_names_of_options(folder: Path) -> None:
    assert default_options(ask_for(folder)) == {}
    found = default_options(
        ask_for(folder, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=7,
                num_return_sequences=2, stop_strings="END", typical_p=0.6,
                repetition_penalty=1.1, min_p=0.05, min_new_tokens=2, suppress_tokens=[7])
    )  # fmt: skip
    assert found == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 7, "num_samples": 2,
        "stop": ["END"], "repetition_penalty": 1.1, "min_p": 0.05, "min_new_tokens": 2,
        "suppress_tokens": [7],
    }  # fmt: skip
    # transformers does not sample then, whatever the temperature is.
    assert default_options(ask_for(folder, do_sample=False))["temperature"] == 0
    assert settings(folder, None, temperature=0.6, typical_p=0.6) == (
        f"--target {folder} has a generation_config.json: this run cannot use typical_p 0.6, which "
        "specdist does not support"
    )


def test_a_run_with_the_models_settings(options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """The manifest and config.yaml have what was used, and the same command goes on with the run."""
    ask_for(folder, temperature=0.5, top_k=20, max_new_tokens=3, typical_p=0.6)
    asked = {name: value for name, value in options.items() if name not in ("temperature", "max_new_tokens")}
    asked |= {"target": folder, "limit": 2, "top_k": 9, "generation_config": "model"}
    for _ in range(2):
        ended = run_here(**asked, output=tmp_path / "run")
        assert ended.code == 0, ended.stderr
        assert ended.stderr.count("cannot use typical_p 0.6, which specdist does not support") == 1
    found = RunFolder(tmp_path / "run").manifest.fingerprint
    assert (found["temperature"], found["top_k"], found["max_new_tokens"]) == (0.5, 9, 3)
    assert "temperature: 0.5\n" in (tmp_path / "run" / "config.yaml").read_text()
