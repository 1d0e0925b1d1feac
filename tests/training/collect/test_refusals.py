"""What a collection refuses, with a message for its user and before a model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specdist.cli import collect as main
from specdist.models.passes.runner import ModelRunner
from specdist.training.collect import run
from tests.job.launching import refused, run_here


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model would have been loaded")

    monkeypatch.setattr(run, "build_replica", load)


@pytest.mark.usefixtures("no_models")
@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"kind": "verifier", "token_mixing": 0.5}, ["--token_mixing 0.5", "--kind verifier"]),
        ({"kind": "acceptance", "token_mixing": 1}, ["--token_mixing 1"]),
    ],
)
def test_options_without_meaning_are_refused(
    options: dict[str, Any], tmp_path: Path, changes: dict[str, Any], fragments: list[str]
) -> None:
    refused(run_here(main, **(options | changes), output=tmp_path / "data"), *fragments)


@pytest.mark.usefixtures("no_models")
def test_a_folder_with_another_collection_is_refused(
    acceptance: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    output = shutil.copytree(acceptance, tmp_path / "data")
    ended = run_here(main, **options, kind="acceptance", token_mixing=0.3, output=output)
    refused(ended, "with different settings", "token_mixing")


def test_hidden_states_too_large_for_half_precision_are_refused(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be stored as infinities."""
    plain = ModelRunner.forward_with_hidden

    def huge(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = plain(*arguments)
        return logits, hidden * 1e6

    monkeypatch.setattr(ModelRunner, "forward_with_hidden", huge)
    options = options | {"kind": "acceptance", "limit": 2}
    ended = run_here(main, **options, output=tmp_path / "half")
    refused(ended, "--hidden_dtype float16 cannot represent", "use --hidden_dtype float32")
    ended = run_here(main, **options, hidden_dtype="float32", output=tmp_path / "single")
    assert ended.code == 0
