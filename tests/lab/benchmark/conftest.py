"""A tiny synthetic pair with its prompts, and the benchmark job, run in this process."""

from __future__ import annotations

import contextlib
import io
import logging
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdist.job.costs import measuring as costs
from specdist.job.costs import pass_times
from specdist.job.costs.pass_times import PassTimer
from specdist.job.costs.round_times import NO_HOST
from specdist.lab.benchmark import run as measuring
from specdist.lab.synthetic.config import SHAPES, Shape
from tests.lab.benchmark import overhead
from tests.lab.benchmark.config import ComparisonConfig
from tests.lab.benchmark.setting import ComparedSetting, set_up_comparison
from tests.ranks import REPOSITORY

TINY = Shape(
    num_layers=4,
    num_draft_layers=1,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=512,
)
NUM_DRAFT_TOKENS = 3


RunJob = Callable[..., str]


def known_pass_ns(timer: PassTimer, num_rows: int, num_tokens: int, context: int) -> int:
    """Pass times that goodput uses in this process, however busy the machine is: drafting is cheap."""
    del num_rows, context
    return timer._runner.model.config.num_hidden_layers * (2_000_000 + 50_000 * num_tokens)


@pytest.fixture(scope="package", autouse=True)
def tiny_shape() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(SHAPES, "tiny", TINY)
        monkeypatch.setattr(pass_times, "NUM_PASSES", 2)
        monkeypatch.setattr(PassTimer, "__call__", known_pass_ns)
        monkeypatch.setattr(costs, "host_times", lambda *_: NO_HOST)
        monkeypatch.setattr(overhead, "NUM_RUNS", 1)
        monkeypatch.setattr(measuring, "NUM_WARMUP_TOKENS", 2)
        yield


@pytest.fixture(scope="package")
def setting(tiny_shape: None, tmp_path_factory: pytest.TempPathFactory) -> ComparedSetting:
    config = ComparisonConfig(
        output="unused",
        synthetic="tiny",
        epsilon=0.1,
        synthetic_folder=str(tmp_path_factory.mktemp("pairs")),
        num_prompts=5,
        max_prompt_tokens=10,
        max_new_tokens=24,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        batch_sizes=[3],
        device="cpu",
    )
    return set_up_comparison(config)


@pytest.fixture
def run_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunJob:
    """``jobs/benchmark.py`` with these arguments in an empty folder; returns its stdout."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        return run_benchmark_job(*arguments)

    return run


def run_benchmark_job(*arguments: str) -> str:
    """In this process and folder: starting an interpreter would take longer than the job."""
    job = REPOSITORY / "jobs" / "benchmark.py"
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()) as stdout:
        monkeypatch.setattr("sys.argv", [str(job), *arguments, "--device", "cpu"])
        # The job configures the root logger, which belongs to pytest here.
        monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(job), run_name="__main__")
    if ended.value.code:
        raise ended.value
    return stdout.getvalue()
