"""What a collection refuses, with a message for its user and before a model is loaded."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specdist.cli import collect as main
from specdist.models.passes.runner import ModelRunner
from specdist.training.collect import plan, run
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
        ({"kind": "acceptance", "token_mixing": 1.5}, ["--token_mixing 1.5 must be in [0, 1]"]),
        ({"kind": "acceptance", "reference_column": "reference"}, ["--reference_column reference"]),
        (
            {"kind": "verifier", "reference_column": "answer"},
            ["--reference_column answer", "prompt, ref"],
        ),
        ({"kind": "acceptance", "temperature": -1}, ["--temperature -1.0"]),
        ({"kind": "acceptance", "num_draft_tokens": 0}, ["--num_draft_tokens 0 must be at least 1"]),
    ],
)
def test_options_without_meaning_are_refused(
    options: dict[str, Any], tmp_path: Path, changes: dict[str, Any], fragments: list[str]
) -> None:
    refused(run_here(main, **(options | changes), output=tmp_path / "data"), *fragments)


@pytest.mark.usefixtures("no_models")
@pytest.mark.parametrize(
    ("changes", "name"),
    [({"token_mixing": 0.3}, "token_mixing"), ({"seed": 5}, "seed"), ({"hidden_dtype": "float32"}, "hidden")],
)
def test_a_folder_with_another_collection_is_refused(
    acceptance: Path, options: dict[str, Any], tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    output = shutil.copytree(acceptance, tmp_path / "data")
    ended = run_here(main, **options, kind="acceptance", **changes, output=output)
    refused(ended, "with different settings", name)


def test_sizes_are_announced_first_with_a_warning_if_the_disk_is_too_small(
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """165 bytes: 37 of columns and 64 states of 2; 24 rows of 24 tokens, of which 85 in 100 are drafted."""
    usage = shutil._ntuple_diskusage(10, 9, 1)  # type: ignore[attr-defined]
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: usage)
    with caplog.at_level(logging.INFO):
        plan_only(options, tmp_path, monkeypatch)
    assert "165 bytes" in caplog.text and "0.17 GB" in caplog.text and "about 490 " in caplog.text
    assert "not enough" in caplog.text


def plan_only(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job up to where it would load models, in a logger that pytest sees."""

    class Loaded(Exception):
        pass

    def load(*_: object, **__: object) -> None:
        raise Loaded

    monkeypatch.setattr(run, "build_replica", load)
    monkeypatch.setattr("specdist.job.ranks.entry._configure_logging", lambda _: None)
    with pytest.raises(Loaded):
        main([f"--{name}={value}" for name, value in {**options, "kind": "acceptance",
                                                       "output": tmp_path / "data"}.items()])  # fmt: skip


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
