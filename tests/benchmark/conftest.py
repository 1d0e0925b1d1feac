"""A tiny synthetic pair, with what the benchmark measures on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdist.benchmark.config import BenchmarkConfig
from specdist.benchmark.setting import Setting, set_up
from specdist.synthetic import random_llama
from specdist.synthetic.random_llama import Shape

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


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(random_llama.SHAPES, "tiny", TINY)
        config = BenchmarkConfig(
            output="unused",
            synthetic="tiny",
            epsilon=0.1,
            synthetic_folder=str(folder),
            num_prompts=5,
            max_prompt_tokens=10,
            max_new_tokens=24,
            num_draft_tokens=NUM_DRAFT_TOKENS,
            batch_sizes=[3],
            device="cpu",
        )
        yield set_up(config)
