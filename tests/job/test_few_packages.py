"""One process needs a few packages and no installation of the project; what else is needed is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdist.cli import generate
from specdist.job.ranks.topology import topology_from_environment
from specdist.job.texts.constraints import RunConstraints
from specdist.models.files.checkpoint import open_checkpoint
from specdist.utils import packages
from specdist.utils.errors import UserError
from tests.job.launching import JOB, job_arguments, parse, run_here
from tests.ranks import REPOSITORY

TIMEOUT_S = 200
# What README.md says that one process does not need, by the names of imports.
HIDDEN = {"accelerate", "datasets", "deepspeed", "llguidance", "matplotlib", "pandas", "peft", "psutil"}
# Python imports it before anything else. These packages are then found neither by imports nor by
# ``importlib.metadata``, and the project itself is not installed.
SITE = f"""
import functools, importlib.machinery, importlib.metadata, sys

HIDDEN = {HIDDEN!r}
find_spec = importlib.machinery.PathFinder.find_spec
distribution = importlib.metadata.Distribution.from_name


def visible_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find_spec(name, path, target)


def visible_distribution(name):
    if name.lower().replace("-", "_") in HIDDEN | {{"specdist"}}:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)


# No function: pytest keeps it as an attribute of a class, where a function would become a method.
importlib.machinery.PathFinder.find_spec = functools.partial(visible_spec)
importlib.metadata.Distribution.from_name = staticmethod(visible_distribution)
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
sys.path[:] = [entry for entry in sys.path if entry not in ("", {str(REPOSITORY)!r})]
"""


def test_one_process_gives_the_same_files_without_them(options: dict[str, Any], tmp_path: Path) -> None:
    """By its script, from another folder."""
    given = options | {"limit": 6, "max_new_tokens": 12}
    ordinary = run_here(**given, output=tmp_path / "ordinary")
    words = job_arguments(generate, given | {"output": tmp_path / "few"})
    (tmp_path / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(JOB), *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["exact"] is True and ordinary.totals["exact"] is True
    shards = [path.relative_to(tmp_path / "few") for path in (tmp_path / "few" / "shards").glob("*.arrow")]
    assert shards
    for shard in shards:
        assert (tmp_path / "few" / shard).read_bytes() == (tmp_path / "ordinary" / shard).read_bytes()
    versions = json.loads((tmp_path / "few" / "manifest.json").read_text())["info"]["versions"]
    absent = {name for name, number in versions.items() if number is None}
    assert absent == {"specdist", "deepspeed", "datasets", "accelerate"}


def test_sharding_without_deepspeed_is_refused_at_the_start(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = parse(**options | {"tp_size": 2, "draft": None, "output": tmp_path})
    assert topology_from_environment(config).tp_size == 2
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "deepspeed" else name)
    with pytest.raises(UserError, match="--tp_size 2 needs the package deepspeed, which is not installed"):
        topology_from_environment(config)


def test_a_constraint_without_llguidance_is_refused_at_the_start(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = parse(**options | {"regex": "a+", "output": tmp_path})
    target = open_checkpoint("--target", config.target)
    RunConstraints(config, target)
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "llguidance" else name)
    with pytest.raises(UserError, match="--regex needs the package llguidance, which is not installed"):
        RunConstraints(config, target)
