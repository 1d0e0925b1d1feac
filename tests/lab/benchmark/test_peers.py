"""vLLM beside specdist: the protocol with a stand-in for the engine, and what is said if it does not work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.lab.benchmark.methods import Generated, Row
from specdist.lab.benchmark.peers import WORKER, Vllm, VllmEngine, peer_python
from specdist.lab.benchmark.run import Timed, compare
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError

# The worker's own loop around another engine. It prints where vLLM prints.
STAND_IN = f"""
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("worker", {str(WORKER)!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)

class Engine:
    def __init__(self, fault=None, **options):
        self.version, self.fault, self.size = "1.2", fault, None
        print("loading", options)
        if fault == "dies":
            sys.exit("out of memory")
        if fault == "refuses":
            raise RuntimeError("head_dim=40")
    def prepare(self, batch_size):
        self.size = batch_size
    def generate(self, prompts, limits, stop_token_ids, sampling):
        assert sampling == {{"temperature": 0.0}} and stop_token_ids == [7]
        return [[self.size, *prompt][:limit] for prompt, limit in zip(prompts, limits)]

worker.Engine = Engine
worker.main()
"""
ROWS = [Row([3, 4], 2), Row([5, 6, 8], 9)]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return [sys.executable, "-I", str(script)]


@pytest.fixture
def engine(command: list[str]) -> Iterator[VllmEngine]:
    engine = VllmEngine(command, {"target": "t"}, num_threads=1)
    yield engine
    engine.close()
    assert engine._process.returncode == 0, "the worker did not end by itself"


def method_of(engine: Any, num_draft_tokens: int = 0, batch_size: int = 8) -> Vllm:
    setting: Any = SimpleNamespace(
        pair=SimpleNamespace(stop_token_ids={7}),
        paged=SimpleNamespace(settings=SamplingSettings(temperature=0.0)),
    )
    return Vllm(setting, engine, num_draft_tokens, batch_size)


def test_completions_come_back_by_row_and_batch(engine: VllmEngine, caplog: pytest.LogCaptureFixture) -> None:
    assert engine.version == "1.2"
    with caplog.at_level(logging.WARNING):
        for batch_size in (8, 1):
            method = method_of(engine, batch_size=batch_size)
            method.prepare()
            assert method.generate(ROWS).completions == [[batch_size, 3], [batch_size, 5, 6, 8]]
    assert not caplog.messages, "it was waiting, and used no processor time"


@pytest.mark.parametrize(
    ("fault", "reason"), [("dies", "exit code 1: .*out of memory"), ("refuses", "RuntimeError: head_dim=40")]
)
def test_an_engine_that_does_not_start(command: list[str], fault: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)--peers vllm: vLLM failed \({reason}\): leave --peers out"):
        VllmEngine(command, {"fault": fault}, num_threads=1)


def test_a_call_that_fails(engine: VllmEngine) -> None:
    with pytest.raises(UserError, match=r"vLLM failed \(TypeError: .*unexpected keyword"):
        engine.call("prepare", size=1)


def test_without_its_environment(tmp_path: Path) -> None:
    config = BenchmarkConfig(
        output="r.json", synthetic="5m", acceptance=0.8, peers=["vllm"], peers_folder=str(tmp_path)
    )
    with pytest.raises(UserError, match=rf"make it with `bash jobs/benchmarks/peers.sh {tmp_path}`"):
        peer_python(config)


def test_ratios_are_to_the_better_method_at_the_same_batch() -> None:
    """1, 2 and 4 seconds for as many tokens; at batch 1 the plain method alone."""
    seconds = {(0, 8): 4.0, (5, 8): 2.0, (3, 8): 1.0, (0, 1): 3.0}
    measured = [
        Timed(method_of(None, *key), ROWS[:1], [each], [Generated([[1] * 12])])
        for key, each in seconds.items()
    ]
    results = compare(measured, SamplingSettings())
    assert [result.ratio_to_peer for result in results] == [0.25, 0.5, 1.0, 1.0]
