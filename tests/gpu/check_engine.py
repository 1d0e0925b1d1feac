"""The checks of test_engine.py; each runs in a process with a fake device."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from specdist.models.loading.packed_experts import packed_experts_of
from specdist.models.quantized.quantized_linear import choose_products
from specdist.models.recurrent.kernels import kernels_on
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.options import Processing, TokenOptions
from tests.engine.harness import Harness
from tests.engine.heads import random_head
from tests.gpu.device import DEVICE
from tests.gpu.engine_runs import (
    GPU,
    MAX_DRAFT_TOKENS,
    MODES,
    RULES,
    SIZES,
    Pair,
    generate,
    outcomes,
    prompts,
    warnings_into,
)
from tests.gpu.policies import READS_HEAD, policies
from tests.gpu.project_kernels import ON_HOST
from tests.models.all_families import build
from tests.models.families import FAMILIES, noisy_copy, tiny_model
from tests.models.stored_experts import make_packed

# A token of which the weights are damaged.
BAD_TOKEN = 11
ALL_POLICIES = policies(MAX_DRAFT_TOKENS, first_length=3)
POLICIES = {name: new for name, new in ALL_POLICIES.items() if name not in READS_HEAD}
HEAD_POLICIES = {name: ALL_POLICIES[name] for name in READS_HEAD}
# Those of all families together.
COMBINATIONS = list(itertools.product(POLICIES, RULES))


def check_family(family: str) -> None:
    """Some rules in bfloat16, and one in float32. Modes, rules and policies take turns, so that over all
    families every rule meets every mode and every policy."""
    place = list(FAMILIES).index(family)
    mode = list(MODES.values())[place % len(MODES)]
    mine = COMBINATIONS[place :: len(FAMILIES)]
    policy = list(POLICIES)[(place * len(RULES) + 1) % len(POLICIES)]
    for dtype, combinations in ((torch.bfloat16, mine), (torch.float32, [(policy, "rejection")])):
        target = tiny_model(family).to(dtype)
        pair = Pair(target, noisy_copy(target), dict(mode))
        for policy, rule in combinations:
            pair.check(RULES[rule], POLICIES[policy])


def check_experts() -> None:
    """Of a mixture; in bfloat16 its passes are recorded."""
    torch.manual_seed(0)
    target = build("qwen3_moe").bfloat16()
    pair = Pair(target, noisy_copy(target), dict(MODES["synchronous"]))
    pair.check(RULES["rejection"], POLICIES["fixed"])


def check_packed_experts() -> None:
    """All experts in one launch, in recorded passes; a CPU takes one after the other."""
    torch.manual_seed(0)
    target = build("qwen3_moe").bfloat16()
    draft = noisy_copy(target)
    make_packed(target)
    pair = Pair(target, draft, dict(MODES["synchronous"]))
    on_gpu = pair.on_gpu.runners[0].model
    choose_products(on_gpu, torch.bfloat16)
    packed = dict(packed_experts_of(on_gpu))
    assert packed and all(each.product == each.kernel_product for each in packed.values())
    pair.check(RULES["rejection"], POLICIES["fixed"], prompts((9, 14)))


def check_states() -> None:
    """Of recurrent layers, by their kernels, in recorded passes of the target and runs of the draft."""
    kernels = kernels_on(GPU)
    assert kernels is not None
    for family, mode in (("jamba", "synchronous"), ("qwen3_5_text", "branches")):
        torch.manual_seed(0)
        target = build(family)
        asked = Counter[str]()
        with patch.dict(ON_HOST, {name: _counted(name, asked) for name in kernels._fields}):
            pair = Pair(target, noisy_copy(target), dict(MODES[mode]))
            pair.check(RULES["rejection"], POLICIES["fixed"], prompts((9, 14)))
        target_runner, draft_runner = pair.on_gpu.runners
        recorded = (
            target_runner._static,
            draft_runner.runs if mode == "synchronous" else draft_runner._static,
        )
        assert all(each is not None and each._graphs._replays for each in recorded)
        assert set(asked) == {"delta_rule" if family == "qwen3_5_text" else "mamba"}


def _counted(name: str, asked: Counter[str]) -> Callable[..., Any]:
    own = ON_HOST[name]

    def run(*args: Any) -> Any:
        asked[name] += 1
        return own(*args)

    return run


def check_short_runs() -> None:
    """Runs in which some rows take fewer steps than others, and padding takes none: what these read is what
    was last written beside the cache."""
    target = tiny_model("llama")
    pair = Pair(target, noisy_copy(target), dict(MODES["synchronous"]))
    pair.check(RULES["rejection"], POLICIES["fixed"])


def check_heads(mode: str) -> None:
    """All policies that read a head."""
    target = tiny_model("llama", seed=3).bfloat16()
    draft = noisy_copy(target)
    pair = Pair(target, draft, {**MODES[mode], "head": random_head(draft, uses_features=True)})
    pair.check(RULES["top_p"], HEAD_POLICIES["specdecpp"])
    pair.check(RULES["rejection"], HEAD_POLICIES["goodput+head"])
    # The policy that trusts the draft.
    lossy = Pair(target, draft, {**MODES[mode], "head": random_head(draft), "trusts_draft": True})
    lossy.check(RULES["rejection"], HEAD_POLICIES["sprinter"])


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
    Pair(target, draft, dict(MODES["branches"])).check(settings, POLICIES["gammatune_plus"])
    greedy = dataclasses.replace(processing, defaults=dataclasses.replace(options, temperature=0.0))
    with_head = {"head": random_head(draft, uses_features=True)}
    Pair(target, draft, with_head).check(
        SamplingSettings(temperature=0.0, processing=greedy), HEAD_POLICIES["specdecpp"]
    )


def check_preemption() -> None:
    """Rows outgrow the pages, are preempted, and come back."""
    target = tiny_model("qwen3").bfloat16()
    few_pages = {"num_pages": 18, "max_num_seqs": 8, "max_new_tokens": 32}
    pair = Pair(target, noisy_copy(target), few_pages)
    pair.check(RULES["rejection"], POLICIES["fixed"], prompts(range(3, 11)))
    assert pair.on_gpu.stats_recorder.close_shard(0).num_preemptions > 0


def check_damaged_rows(dtype_name: str) -> None:
    """A row without finite logits ends as an error; other rows are unchanged, and graphs stay in use."""
    target = tiny_model("llama")
    draft = noisy_copy(target)
    for model in (target, draft):
        model.get_input_embeddings().weight[BAD_TOKEN] = torch.nan
    dtype = getattr(torch, dtype_name)
    # So few pages that later rows get those of the damaged row.
    pair = Pair(target.to(dtype), draft.to(dtype), {"max_num_seqs": 2, "num_pages": 20})
    rows = [[12 if token == BAD_TOKEN else token for token in row] for row in prompts((20, 9, 18, 14, 17))]
    rows[1][4] = BAD_TOKEN
    messages: list[str] = []
    expected = outcomes(pair.expected(RULES["rejection"], POLICIES["fixed"], rows))
    with warnings_into(messages):
        found = outcomes(generate(pair.on_gpu, RULES["rejection"], POLICIES["fixed"], rows))
    assert found == expected
    assert [reason for _, reason, _ in found] == ["length", "error", "length", "length", "length"]
    assert all("draft's logits are not finite" in message for message in messages), messages


def check_out_of_memory() -> None:
    """In a pass, in the sampling after it, in the draft, in a capture: the batch is halved, and no token
    changes."""
    target = tiny_model("llama", seed=3).bfloat16()
    models = target, noisy_copy(target)
    rule, policy = RULES["rejection"], POLICIES["gammatune"]
    expected = outcomes(Pair(*models).expected(rule, policy))
    for plan in (
        {"allocation": 40, "within": "models/passes/torch_pass.py"},
        {"allocation": 3, "within": "sampling/"},
        {"allocation": 9, "within": "models/passes/static_runs.py"},
        {"capture": 2},
    ):
        messages: list[str] = []
        replica = Harness(*models, device=GPU, **SIZES)
        DEVICE.fail_at(**plan)  # type: ignore[arg-type]
        with warnings_into(messages):
            found = outcomes(generate(replica, rule, policy))
        assert found == expected, plan
        (message,) = messages
        assert "CUDA out of memory" in message and "at most 1 sequences and 16 tokens" in message, message
        assert replica.stats_recorder.close_shard(0).num_out_of_memory == 1
