"""The pair of models is built once; every test makes run folders of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from specdist.job import generate
from tests.job.heads import write_heads
from tests.job.killing import SLOW
from tests.job.launching import Ended, run_here
from tests.job.pair import Pair


@pytest.fixture(scope="session")
def heads(pair: Pair) -> dict[str, Path]:
    """Heads for the policies that read one."""
    return write_heads(pair)


@pytest.fixture(scope="session")
def options(pair: Pair) -> dict[str, Any]:
    """A job of three shards, but for its output: greedy, speculative, on the CPU."""
    return pair.job(temperature=0, max_new_tokens=32, rows_per_shard=10)


@pytest.fixture(scope="session")
def greedy(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The run folder of an undisturbed greedy run, only to be read, and the run's output."""
    output = tmp_path_factory.mktemp("greedy") / "run"
    return output, run_here(**options, output=output)


@pytest.fixture
def finished(greedy: tuple[Path, Ended], tmp_path: Path) -> Path:
    """A copy of a finished run, free to be changed."""
    return Path(shutil.copytree(greedy[0], tmp_path / "run"))


@pytest.fixture(scope="session")
def slow(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The options of a slow run, and the folder of one that nothing disturbed."""
    output = tmp_path_factory.mktemp("slow") / "run"
    assert run_here(**(options | SLOW), output=output).code == 0
    return options | SLOW, output


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model would be loaded."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model would have been loaded")

    monkeypatch.setattr(generate, "build_replica", load)
