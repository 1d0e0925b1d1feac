"""jobs/one_round.py, the algorithm to be read, gives the engine's tokens: two programs that share no code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.job.launching import read_output, run_here
from tests.job.pair import Pair
from tests.ranks import REPOSITORY

SCRIPT = REPOSITORY / "jobs" / "one_round.py"
MAX_LINES = 300
NUM_NEW, SEED = 24, 7
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "gumbel": {"temperature": 1.0, "acceptance": "gumbel"},
    "rejection": {"temperature": 0.9, "top_k": 50, "top_p": 0.95},
}


@pytest.fixture(scope="module")
def one_round() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_round", SCRIPT)
    assert spec is not None and spec.loader is not None
    sys.modules["one_round"] = module = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("acceptance", SETTINGS)
def test_it_gives_the_engine_s_tokens(
    acceptance: str, one_round: ModuleType, pair: Pair, tmp_path: Path
) -> None:
    """Greedy and gumbel whatever is drafted; with rejection for the same lengths of blocks."""
    options: dict[str, Any] = SETTINGS[acceptance]
    assert run_here(
        prompts=pair.prompts, target=pair.target, draft=pair.draft, device="cpu", seed=SEED,
        num_draft_tokens=4, max_new_tokens=NUM_NEW, limit=10, output=tmp_path / "run", **options,
    ).code == 0  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    target, draft = (AutoModelForCausalLM.from_pretrained(path) for path in (pair.target, pair.draft))
    numbers = {name: value for name, value in options.items() if name != "acceptance"}
    sampling = one_round.Sampling(acceptance=acceptance, **numbers)
    outcomes = set()
    for row in read_output(tmp_path / "run").to_pylist():
        length = one_round.AdaptiveLength(0.05, 8)
        if acceptance == "rejection":
            length.choose = lambda: 4
        rounds = list(
            one_round.generate(
                target, draft, tokenizer(row["prompt"])["input_ids"], {tokenizer.eos_token_id},
                max_new_tokens=NUM_NEW, sampling=sampling, length=length, seed=SEED, row_id=row["row_id"],
            )
        )  # fmt: skip
        token_ids = [token_id for found in rounds for token_id in found.token_ids({tokenizer.eos_token_id})]
        assert token_ids == row["completion_ids"], row["row_id"]
        outcomes |= {(len(found.candidate_ids), found.num_accepted) for found in rounds}
    assert {(4, 0), (4, 4)} <= outcomes, "some blocks were rejected at once, and some accepted as a whole"
    assert acceptance == "rejection" or len({drafted for drafted, _ in outcomes}) > 2, "lengths adapt"


def test_it_can_be_read_in_one_sitting() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert "specdist" not in text
