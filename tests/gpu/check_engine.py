"""The checks of test_engine.py; each runs in a process with a fake device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from specdist.models.loading.packed_experts import packed_experts_of
from specdist.models.quantized.quantized_linear import choose_products
from specdist.models.recurrent.kernels import kernels_on
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.row_table import Processing, TokenOptions
from tests.engine.heads import random_head
from tests.gpu.engine_runs import GPU, MODES, Pair, prompts
from tests.kernels.plain import ON_HOST
from tests.models.all_families import build
from tests.models.families import noisy_copy, tiny_model
from tests.models.stored_experts import make_packed


def check_family(family: str, mode: str, rule: str, policy: str) -> None:
    target = tiny_model(family)
    Pair(target, noisy_copy(target), dict(MODES[mode])).check(rule, policy)


def check_packed_experts() -> None:
    """All experts in one launch, in recorded passes; a CPU takes one after the other."""
    torch.manual_seed(0)
    target = build("qwen3_moe")
    draft = noisy_copy(target)
    make_packed(target)
    pair = Pair(target, draft)
    on_gpu = pair.on_gpu.runners[0].model
    choose_products(on_gpu, torch.float32)
    packed = dict(packed_experts_of(on_gpu))
    assert packed and all(each.product == each.kernel_product for each in packed.values())
    pair.check("rejection", "fixed", prompts((9, 14)))


def check_states(family: str, mode: str, kernel: str) -> None:
    """States of recurrent layers, by their kernels, in recorded passes of the target and runs of the
    draft."""
    kernels = kernels_on(GPU)
    assert kernels is not None
    torch.manual_seed(0)
    target = build(family)
    asked = Counter[str]()
    with patch.dict(ON_HOST, {name: _counted(name, asked) for name in kernels._fields}):
        pair = Pair(target, noisy_copy(target), dict(MODES[mode]))
        pair.check("rejection", "fixed", prompts((9, 14)))
    target_runner, draft_runner = pair.on_gpu.runners
    recorded = target_runner._static, draft_runner.runs if mode == "synchronous" else draft_runner._static
    assert all(each is not None and each._graphs._replays for each in recorded)
    assert set(asked) == {kernel}


def _counted(name: str, asked: Counter[str]) -> Callable[..., Any]:
    own = ON_HOST[name]

    def run(*args: Any) -> Any:
        asked[name] += 1
        return own(*args)

    return run


def check_heads() -> None:
    """Policies that read a head, and the one that trusts the draft."""
    target = tiny_model("llama", seed=3)
    draft = noisy_copy(target)
    pair = Pair(target, draft, {"head": random_head(draft, uses_features=True)})
    pair.check("top_p", "specdecpp")
    lossy = {"head": random_head(draft), "trusts_draft": True, **MODES["branches"]}
    Pair(target, draft, lossy).check("rejection", "sprinter")


def check_processing() -> None:
    """Penalties, biases and filters of each row, and log-probabilities, under a policy with features and
    under one that reads a head."""
    target = tiny_model("llama", seed=3)
    draft = noisy_copy(target)
    options = TokenOptions(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3,
                           presence_penalty=0.3)  # fmt: skip
    processing = Processing(
        defaults=options, logit_bias=((3, 1.0),), bad_words=((4, 5), (6,)), min_new_tokens=4, end_ids=(7,)
    )
    settings = SamplingSettings(temperature=0.8, processing=processing, num_logprobs=2, num_prompt_logprobs=1)
    Pair(target, draft, dict(MODES["branches"])).check(settings, "gammatune_plus")
    greedy = dataclasses.replace(processing, defaults=dataclasses.replace(options, temperature=0.0))
    head = {"head": random_head(draft, uses_features=True)}
    Pair(target, draft, head).check(SamplingSettings(temperature=0.0, processing=greedy), "specdecpp")
