"""Mixtures of experts as users run them: over two ranks, with a draft on a rank of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.job.chain import generate_at_known_costs
from tests.job.launching import read_output
from tests.job.ranks import fork_ranks
from tests.models.all_families import VOCAB_SIZE, save_pair

NUM_NEW, LENGTHS = 40, (3, 12, 40, 70)


def written_prompts(path: Path) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    # The words of smaller ids begin with those of special tokens.
    prompts = [torch.randint(20, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    rows = [{"prompt": " ".join(f"t{token_id}" for token_id in prompt)} for prompt in prompts]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return prompts


def generated(target: PreTrainedModel, prompt: list[int]) -> list[int]:
    """By transformers, with the family's own attention; up to the end of the text."""
    tokens = target.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_mixture_over_two_ranks_and_a_draft_give_the_tokens_of_transformers(
    family: str, tmp_path: Path
) -> None:
    target = save_pair(family, tmp_path / "pair").eval()
    prompts = written_prompts(tmp_path / "prompts.jsonl")
    ended = fork_ranks(
        3, generate_at_known_costs, prompts=tmp_path / "prompts.jsonl", output=tmp_path / "run",
        target=tmp_path / "pair/target", draft=tmp_path / "pair/draft", tp_size=2, device="cpu",
        dtype="float32", temperature=0, max_new_tokens=NUM_NEW, cache_memory="256MiB", num_draft_tokens=3,
        overlap="asynchronous",
    )  # fmt: skip
    assert ended.totals["exact"] is True
    # Once, also where windowed layers have pages of their own.
    assert ended.stderr.count("memory of cpu in GiB") == 1
    assert ended.totals["num_error_rows"] == 0, ended.stderr
    # A draft that errs on purpose: tokens were both accepted and rejected.
    assert 0 < (ended.totals["draft_acceptance_rate"] or 0) < 1, ended.stderr
    found = read_output(tmp_path / "run")["completion_ids"].to_pylist()
    assert found == [generated(target, prompt) for prompt in prompts]
