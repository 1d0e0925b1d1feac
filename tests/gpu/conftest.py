"""The pair of models of the main job, built once for all tests on fake GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.job.pair import NUM_VOCAB_TOKENS, Pair, random_llama, save


@pytest.fixture(scope="session")
def options(pair: Pair) -> dict[str, Any]:
    """Two shards of few rows. In float32 devices differ by rounding only, which changes no token here."""
    return {
        "prompts": pair.prompts,
        "target": pair.target,
        "draft": pair.draft,
        "dtype": "float32",
        "temperature": 0,
        "policy": "fixed",
        "num_draft_tokens": 3,
        "max_new_tokens": 6,
        "max_num_seqs": 3,
        "cache_memory": "64MiB",
        "rows_per_shard": 2,
        "limit": 4,
    }


@pytest.fixture(scope="session")
def sharp_pair(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Models that are sure of every token, whatever the precision: each is followed by one that depends on it
    alone. The draft follows another order after a quarter of them."""
    folder = tmp_path_factory.mktemp("sharp")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair.target)
    generator = torch.Generator().manual_seed(0)
    # No token is followed by token 0, which ends a row.
    after = torch.randint(1, NUM_VOCAB_TOKENS, (NUM_VOCAB_TOKENS,), generator=generator)
    other = torch.randint(1, NUM_VOCAB_TOKENS, (NUM_VOCAB_TOKENS,), generator=generator)
    differs = torch.arange(NUM_VOCAB_TOKENS) % 4 == 0
    save(folder / "target", _sure_model(after), tokenizer)
    save(folder / "draft", _sure_model(torch.where(differs, other, after)), tokenizer)
    return Pair(folder, folder / "target", folder / "draft", pair.prompts)


@torch.no_grad()
def _sure_model(after: torch.Tensor) -> PreTrainedModel:
    """The output head knows what comes ``after`` each embedding; the layers add a tenth of themselves."""
    model = random_llama()
    embeddings = model.get_input_embeddings().weight
    embeddings.copy_(torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1)))
    head = torch.zeros_like(embeddings).index_add_(0, after, embeddings)
    model.get_output_embeddings().weight.copy_(head)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    return model
