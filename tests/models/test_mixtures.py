"""Mixtures of experts over two and four ranks, with experts cut and with whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.models.all_families import build
from tests.ranks import run_ranks

NUM_NEW, PROMPT_LENGTH = 30, 6
# Of every layout of joined experts one, and of every way in which a block adds shared experts. Four ranks
# have one or two of six experts.
TWO: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    # So that one expert matters.
    "num_experts_per_tok": 2, "n_shared_experts": 1,
}  # fmt: skip
SIX: dict[str, Any] = {"num_key_value_heads": 4, "num_experts": 6, "num_local_experts": 6}
# With these no router of bfloat16 chooses much else, and an expert is missed.
SEEDS = {2: 3, 4: 1}
OVER = {2: ("gpt_oss", "qwen2_moe", "deepseek_v3"), 4: ("qwen3_moe",)}


@torch.inference_mode()
def reference(model: PreTrainedModel) -> dict[str, Any]:
    """The tokens of ``generate``, and logits of transformers' own forward."""
    prompt = torch.arange(20, 20 + PROMPT_LENGTH)[None]
    tokens = model.generate(prompt, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
    logits, rounded = (model.to(dtype)(tokens).logits[0].float() for dtype in (torch.float32, torch.bfloat16))
    return {"tokens": tokens, "prompt_length": PROMPT_LENGTH, "logits": logits, "rounded": rounded}


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", OVER)
def test_mixtures_over_ranks_are_those_of_transformers(tmp_path: Path, num_ranks: int) -> None:
    folders = [tmp_path / family for family in OVER[num_ranks]]
    for family, folder in zip(OVER[num_ranks], folders, strict=True):
        model = build(family, SEEDS[num_ranks], **TWO, **(SIX if num_ranks == 4 else {}))
        model.save_pretrained(folder)
        torch.save(reference(model), folder / "wanted.pt")
    run_ranks("tests.models.sharded_mixtures", num_ranks, str(num_ranks), *map(str, folders))
