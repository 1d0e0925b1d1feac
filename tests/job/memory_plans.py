"""What memory is planned for: models of three sizes, batches, and options."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig

from specdist.engine.schedule.plan import SchedulerSettings
from specdist.job.costs.allocation import BatchLimits
from specdist.models.sizes.sizes import ModelSize, model_size

GIB = 2**30


def llama(hidden: int, wide: int, layers: int, heads: int, *, head_dim: int, tied: bool = False) -> ModelSize:
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )
    return model_size(f"llama-{layers}", config, 2)


@cache
def llama_70b() -> ModelSize:
    return llama(8192, 28_672, 80, 64, head_dim=128)


@cache
def llama_8b() -> ModelSize:
    return llama(4096, 14_336, 32, 32, head_dim=128)


@cache
def llama_1b() -> ModelSize:
    return llama(2048, 8192, 16, 32, head_dim=64, tied=True)


def rows(
    *,
    num_rows: int = 32,
    max_seq_len: int = 8192,
    max_num_batched_tokens: int = 2048,
    max_draft_tokens: int = 5,
    shares_room: bool = False,
    **branches: Any,
) -> BatchLimits:
    scheduling = SchedulerSettings(
        max_num_seqs=num_rows,
        max_num_batched_tokens=max_num_batched_tokens,
        max_draft_tokens=max_draft_tokens,
        max_new_tokens=1024,
        max_seq_len=max_seq_len,
        seed=0,
        shares_room=shares_room,
    )
    return BatchLimits(scheduling=scheduling, **branches)


def config_of(**options: Any) -> Any:
    cache = options.pop("cache_memory", None)
    given = {
        "temperature": 1.0,
        "acceptance": "rejection",
        "top_p": 1.0,
        "processes_logits": False,
        "prompt_logprobs": None,
        **options,
    }
    given["is_greedy"] = given["temperature"] == 0
    size = None if cache is None else int(float(cache.removesuffix("GiB")) * GIB)
    return SimpleNamespace(**given, cache_memory=cache, cache_bytes=lambda: size)
