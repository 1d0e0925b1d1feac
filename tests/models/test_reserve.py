"""The memory of passes beside weights and cache: each term against measured passes, and their sums."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteSWAConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
)

from specdist.engine.messages.interfaces import VerifyInput
from specdist.engine.target.local_target import FullDistributions
from specdist.models.attention.kernel import MAX_SPLIT_BYTES
from specdist.models.batch.flat import FlatBatch
from specdist.models.families.adapters import use_paged_attention
from specdist.models.families.dry_run import LayerShapes
from specdist.models.passes.runner import ModelRunner
from specdist.models.sizes.reserve import (
    PassLimits,
    Reserve,
    Sampling,
    activation_bytes,
    logit_bytes,
    mask_bytes,
    page_overhead,
    reserve,
)
from specdist.models.sizes.sizes import model_size
from specdist.sampling.branch_estimates import draft_distributions, draft_features
from specdist.sampling.distributions import SamplingSettings
from tests.models.live_bytes import LiveBytes

CPU = torch.device("cpu")
GIB = 2**30
NUM_TOKENS, NUM_ASKED = 256, 48
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 2048, "max_position_embeddings": 512}
WIDE = LlamaConfig(intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, **SHAPE)
NARROW = LlamaConfig(intermediate_size=16, num_attention_heads=1, num_key_value_heads=1, head_dim=8, **SHAPE)
MANY_HEADS = LlamaConfig(
    intermediate_size=16, num_attention_heads=16, num_key_value_heads=8, head_dim=64, **SHAPE
)
EXPERTS = MixtralConfig(
    intermediate_size=128, num_attention_heads=1, num_key_value_heads=1, head_dim=8, num_local_experts=8,
    num_experts_per_tok=4, **SHAPE,
)  # fmt: skip
CAPPED = Gemma2Config(
    intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, **SHAPE
)
SINKS = GraniteSWAConfig(intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, **SHAPE)


def runner_of(config: PretrainedConfig, dtype: torch.dtype) -> ModelRunner:
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    use_paged_attention(model)
    return ModelRunner(model, CPU, model_impl="transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config", [WIDE, NARROW, MANY_HEADS, EXPERTS], ids=["wide", "narrow", "many heads", "experts"]
)
def test_a_pass_holds_what_is_reserved_for_activations_and_not_much_less(
    config: PretrainedConfig, dtype: torch.dtype
) -> None:
    runner = runner_of(config, dtype)
    runner.torch_pass._linears = None  # a GPU has none of them
    size = model_size("it", config, dtype.itemsize)
    tokens = torch.arange(NUM_TOKENS)
    with LiveBytes() as live:
        runner.torch_pass.compute(tokens, tokens, torch.arange(1), LayerShapes())
    reserved = activation_bytes(size, NUM_TOKENS, 1)
    assert live.peak <= reserved <= 2 * live.peak, (live.peak, reserved)


SETTINGS = {
    "rejection": (SamplingSettings(), Sampling()),
    "top-k": (SamplingSettings(top_k=20), Sampling()),
    "top-p": (SamplingSettings(top_p=0.9), Sampling(has_top_p=True)),
    "gumbel": (SamplingSettings(is_coupled=True), Sampling(next_distributions="gumbel")),
    "gumbel, top-p": (
        SamplingSettings(is_coupled=True, top_p=0.9),
        Sampling(next_distributions="gumbel", has_top_p=True),
    ),
    "greedy": (SamplingSettings(temperature=0), Sampling(next_distributions="greedy")),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_verifying_and_drafting_hold_what_is_reserved_for_logits(name: str) -> None:
    """For the target, and for the draft with its features."""
    settings, sampling = SETTINGS[name]
    size = model_size("it", WIDE, 2)
    keys, positions = np.zeros(NUM_ASKED, np.int64), np.arange(NUM_ASKED)
    verify_input = VerifyInput(
        batch=FlatBatch(keys, keys, positions),
        logits_indices_N=positions,
        stream_keys_N=keys,
        target_logits_indices_C=positions[:-8],
    )
    found = []
    # Beside the logits themselves, which are held twice where a recorded pass has given them.
    logits_NV = torch.randn(NUM_ASKED, size.vocab_size).bfloat16()
    with LiveBytes() as live:
        distributions = FullDistributions.of(logits_NV, settings, verify_input)
        distributions.candidate_probabilities()
        distributions.next_distributions(np.arange(8))
    found.append(live.peak)
    del distributions
    with LiveBytes() as live:
        drawn_from, _, undecided = draft_distributions(
            logits_NV, settings, torch.from_numpy(keys), torch.from_numpy(positions)
        )
        uniforms = torch.zeros(NUM_ASKED).double() if settings.is_random else None
        drawn = drawn_from.draw(uniforms).clamp(min=0)
        draft_features(logits_NV, undecided, drawn, settings)
    found.append(live.peak)
    limits = PassLimits(num_tokens=1, num_logits=NUM_ASKED, num_seqs=8, max_seq_len=1)
    reserved = logit_bytes(size, limits, sampling, 1) - 2 * logits_NV.nbytes
    # A number or two per token, beside those per logit.
    small = 64 * NUM_ASKED
    assert 0.5 * reserved <= max(found) <= reserved + small, (found, reserved)


@pytest.mark.parametrize(("config", "dtype"), [(each, torch.float32) for each in (WIDE, CAPPED, SINKS)])
def test_attention_without_a_kernel_holds_what_is_reserved_for_its_masks(
    config: PretrainedConfig, dtype: torch.dtype
) -> None:
    runner = runner_of(config, dtype)
    size = model_size("it", config, dtype.itemsize)
    assert size.keeps_scores == (config is not WIDE)
    runner.allocate(num_pages=32, page_size=16, num_slots=1, max_seq_len=512)
    runner.pages.pages[0] = np.arange(32)
    before, new = FlatBatch(*(np.arange(256) * part for part in (1, 0, 1))), np.arange(256, 512)
    runner.forward(before, [])
    with LiveBytes() as live:
        runner.forward(FlatBatch(new, new * 0, new), [])
    limits = PassLimits(num_tokens=256, num_logits=0, num_seqs=1, max_seq_len=512)
    masks = mask_bytes(size, limits, 1)
    gathered = 512 * page_overhead(size, 1)
    most = masks + gathered + activation_bytes(size, 256, 1)
    # Beside the masks there is a pass, too.
    assert live.peak <= most <= 2 * live.peak, (live.peak, masks, gathered, most)


def test_what_several_ranks_share_is_less_on_each_and_rows_at_rank_0_are_whole() -> None:
    size = model_size("it", WIDE, 2)
    limits = PassLimits(num_tokens=256, num_logits=64, num_seqs=8, max_seq_len=512)
    follower = dataclasses.replace(limits, decides=False)
    plain, top_p = Sampling(), Sampling(has_top_p=True)
    assert activation_bytes(size, 256, 2) < activation_bytes(size, 256, 1)
    assert logit_bytes(size, follower, plain, 2) == logit_bytes(size, limits, plain, 1) / 2
    assert logit_bytes(size, limits, top_p, 2) > 64 * size.vocab_size * 24
    # A whole row per sequence alone.
    assert logit_bytes(size, limits, plain, 2) < logit_bytes(size, limits, plain, 1)
    assert page_overhead(size, 2) == page_overhead(size, 1) / 2 == size.cache_bytes_per_token(2) / 2


def test_two_models_that_take_turns_share_what_passes_need() -> None:
    one = Reserve(activations=5, logits=1, kept_scores=2, graphs=3, graph_nodes=1, libraries=4, margin=6)
    two = Reserve(activations=3, logits=7, kept_scores=20, graphs=30, graph_nodes=2, libraries=4, margin=6)
    both = Reserve(activations=5, logits=7, kept_scores=22, graphs=33, graph_nodes=3, libraries=4, margin=6)
    assert one.beside(two) == two.beside(one) == both
    assert both.total == 80


def test_the_terms_of_a_pass_grow_with_what_they_are_of() -> None:
    size = model_size("it", WIDE, 2)
    limits = PassLimits(num_tokens=256, num_logits=64, num_seqs=8, max_seq_len=512, num_kept=4)
    base = reserve(size, limits, Sampling(), device_bytes=GIB)
    assert base.attention == MAX_SPLIT_BYTES and base.nccl == 0
    for change, term in (
        ({"num_tokens": 512}, "activations"),
        ({"num_logits": 128}, "logits"),
        ({"num_drawn": 1000}, "logits"),
        ({"num_kept": 5}, "kept_scores"),
        ({"num_tokens": 512}, "graphs"),
        ({"num_run_steps": 8}, "graph_nodes"),
        ({"has_kernel": False, "max_seq_len": 2**18}, "attention"),
    ):
        other = reserve(size, dataclasses.replace(limits, **change), Sampling(), device_bytes=GIB)  # type: ignore[arg-type]
        assert getattr(other, term) > getattr(base, term), change
    other = reserve(size, limits, Sampling(), device_bytes=2 * GIB, num_communicators=2)
    assert other.margin == pytest.approx(2 * base.margin) and other.nccl == GIB
