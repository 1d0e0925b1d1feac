"""Relaunching: a finished run is left alone, another run is refused with the difference named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.job.launching import Ended, run_here
from tests.job.pair import Pair


def state(output: Path) -> dict[str, tuple[int, bytes]]:
    """Every file that holds results, with the time of its last change."""
    return {
        str(path.relative_to(output)): (path.stat().st_mtime_ns, path.read_bytes())
        for name in ("shards", "stats", "parts", "manifest.json")
        for path in [output / name, *(output / name).glob("*")]
        if path.is_file()
    }


def test_relaunching_a_finished_run_only_prints_its_totals(
    options: dict[str, Any], greedy: tuple[Path, Ended], finished: Path, no_models: None
) -> None:
    """A requeued job that is already complete must not load 140 GB to find that out."""
    before = state(finished)
    ended = run_here(**options, output=finished)
    assert "nothing to do" in ended.stderr
    assert ended.totals == greedy[1].totals | {"output": str(finished)}
    assert state(finished) == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "seed: 0 in --output, 1 now"),
        ({"rows_per_shard": 11}, "rows_per_shard: 10 in --output, 11 now"),
        ({"limit": 23}, "num_rows: 24 in --output, 23 now"),
        ({"stop": ["x"]}, 'stop: [] in --output, ["x"] now'),
        ({"policy": "none"}, 'policy: "fixed" in --output, "none" now'),
    ],
)
def test_another_setting_is_refused_by_name(
    options: dict[str, Any], finished: Path, no_models: None, changes: dict[str, Any], field: str
) -> None:
    """Rows of two settings in one folder could not be told apart."""
    before = state(finished)
    ended = run_here(**(options | changes), output=finished)
    assert ended.code == 2
    lines = ended.stderr.splitlines()
    assert f"  {field}" in lines
    # A draft that is not used is part of the same change; nothing else may be listed.
    expected = 3 if "policy" in changes else 1
    assert len([line for line in lines if line.startswith("  ")]) == expected
    assert "--overwrite" in lines[-1]
    assert state(finished) == before


def test_changed_prompts_are_refused(
    pair: Pair, options: dict[str, Any], finished: Path, no_models: None, tmp_path: Path
) -> None:
    """One byte of one prompt; the same bytes under another name are the same prompts."""
    content = pair.prompts.read_bytes()
    word = b"reference 3"
    assert content.count(word) == 1
    moved, changed = tmp_path / "moved.arrow", tmp_path / "changed.arrow"
    moved.write_bytes(content)
    changed.write_bytes(content.replace(word, b"reference 4"))
    assert run_here(**(options | {"prompts": moved}), output=finished).code == 0
    ended = run_here(**(options | {"prompts": changed}), output=finished)
    assert ended.code == 2
    assert "\n  prompts: " in ended.stderr


@pytest.mark.parametrize(
    ("role", "file_name"),
    [
        ("target", "weights"),
        ("target", "tokenizer.json"),
        ("target", "chat_template.jinja"),
        ("draft", "weights"),
    ],
)
def test_another_model_is_refused(
    pair: Pair,
    options: dict[str, Any],
    finished: Path,
    no_models: None,
    tmp_path: Path,
    role: str,
    file_name: str,
) -> None:
    """Whatever of a model decides its output: also the template that turns messages into a prompt."""
    folder = tmp_path / "model"
    shutil.copytree(getattr(pair, role), folder)
    assert run_here(**(options | {role: folder}), output=finished).code == 0, "the same model elsewhere"
    path = max(folder.glob("*.safetensors")) if file_name == "weights" else folder / file_name
    content = bytearray(path.read_bytes())
    if file_name == "weights":
        content[-1] ^= 1
    else:
        content += b"\n"
    path.write_bytes(bytes(content))
    before = state(finished)
    ended = run_here(**(options | {role: folder}), output=finished)
    assert ended.code == 2 and f"\n  {role}: " in ended.stderr
    assert state(finished) == before


def test_a_command_that_slurm_repeats_deletes_nothing(
    options: dict[str, Any], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued job, or a task of an array that starts late, would delete what the others have done."""
    before = state(finished)
    for name, value in (("SLURM_RESTART_COUNT", "1"), ("SLURM_ARRAY_TASK_ID", "0"), ("SLURM_NTASKS", "2")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            ended = run_here(**options, output=finished, overwrite=True)
        assert ended.code == 2 and "delete the run's folder yourself" in ended.stderr
    assert state(finished) == before
