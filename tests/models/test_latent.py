"""Latent attention: every family's numbers, in the latents' memory; where they would be others, as before."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, PreTrainedModel

from specdist.models.attention import expanding, expansion, latent
from specdist.models.attention.expanding import MAX_EXPANDED_BYTES, ExpandedAttention
from specdist.models.attention.expansion import Expansion
from specdist.models.attention.latent import Latents
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_whole
from specdist.models.passes import torch_pass
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.models.quantized.quantized import plain_config, quantization_of
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.sizes.reserve import PassLimits, expanded_bytes
from specdist.models.sizes.sizes import model_size
from specdist.models.start_check.loading_check import check_loading, relative_difference
from tests.engine.harness import PAGE_SIZE, page_bytes, paged_runner
from tests.models.all_families import build
from tests.models.chunks import MIXED, GrowingRows, check_rows
from tests.models.families import VOCAB_SIZE, tiny_model
from tests.models.kernels import PlainKernel
from tests.models.quantized_checkpoints import LAYOUTS, write
from tests.models.test_quantized import ROUNDED_TOLERANCE, TOKENS, logits_of

# With and without a projection of queries, rotated in pairs or in halves, with scales of latents.
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3")
EXPANDED = Acceleration(keeps_latents=False)
# DeepSeek's rope, whose factor is in the scale of the scores, too.
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
BLOCKS = "FP8 in blocks, inputs in groups"


def keeps_latents(runner: ModelRunner) -> bool:
    return all(rules.is_latent for rules in runner._shapes.rules.values())


def page_numbers(runner: ModelRunner) -> int:
    return page_bytes(runner, PAGE_SIZE) // PAGE_SIZE // runner.dtype.itemsize


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_every_family_keeps_its_logits_in_the_latents_memory(family: str) -> None:
    plain = build(family)
    runner = paged_runner(plain)
    assert keeps_latents(runner)
    config = plain.config
    num_layers = len(runner._shapes.rules)
    # The latent and the rotated part; and keys and values of all heads.
    assert page_numbers(runner) == num_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    expanded = paged_runner(plain, EXPANDED)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    assert page_numbers(expanded) == num_layers * config.num_attention_heads * width
    for each in (runner, expanded):
        check_rows(plain, each, tolerance=1e-4)


@pytest.mark.parametrize("family", LATENT_FAMILIES[1::2])
def test_in_bfloat16_they_are_as_near_as_transformers_own(family: str) -> None:
    """To float32: absorbed products round at other places, and no more."""
    plain = build(family, seed=3)
    half = copy.deepcopy(plain).bfloat16()
    rows = GrowingRows(plain, MIXED, page_size=PAGE_SIZE)
    kept, expanded = (
        [relative_difference(found.float(), wanted) for found, wanted in rows.run(paged_runner(half, how))]
        for how in (None, EXPANDED)
    )
    assert max(kept) < 1.5 * max(expanded) + 0.01


@pytest.mark.parametrize(
    "acceleration", [Acceleration(), Acceleration(is_static=True, kernels=(PlainKernel(),))]
)
def test_segments_of_many_tokens_expand_latents_to_the_same_logits(
    acceleration: Acceleration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later chunks and others beside blocks, single steps, and heads one after the other."""
    plain = tiny_model("youtu", kv_lora_rank=64)
    absorbed, expanding_runner = paged_runner(plain, acceleration), paged_runner(plain, acceleration)
    rows = GrowingRows(plain, MIXED, page_size=PAGE_SIZE)
    wanted = [found.clone() for found, _ in rows.run(absorbed)]
    monkeypatch.setattr(expansion, "OPERATIONS_PER_BYTE", 0)
    monkeypatch.setattr(expanding, "MAX_EXPANDED_BYTES", 1)
    expanded: list[tuple[int, int, bool]] = []

    class Spied(ExpandedAttention):
        def add(self, begin: int, num_queries: int, num_keys: int, pages_P: Any) -> None:
            expanded.append((num_queries, num_keys, self._of_others is not None))
            super().add(begin, num_queries, num_keys, pages_P)

    monkeypatch.setattr(torch_pass, "ExpandedAttention", Spied)
    monkeypatch.setattr(latent, "ExpandedAttention", Spied)
    for (found, _), own in zip(rows.run(expanding_runner), wanted, strict=True):
        assert relative_difference(found, own) < 1e-5
    # By pass; others were single tokens, blocks and a last chunk of 9 tokens after 61.
    assert set(expanded) == {
        (20, 20, False), (5, 5, False), (60, 60, True), (3, 3, True), (7, 12, True), (6, 9, True),
        (11, 23, True), (16, 41, True),
    }  # fmt: skip


def test_expanding_pays_for_chunks_of_a_few_hundred_tokens_of_deepseek_v3() -> None:
    expansion = Expansion(512, 64, 128, 128, 2)
    fewest = [next(n for n in range(1, keys + 1) if expansion.pays(n, keys)) for keys in (400, 2000, 100_000)]
    assert fewest == [399, 374, 371]
    assert not any(expansion.pays(number, number) for number in range(1, 399))
    assert 370 < expansion.fewest_queries < 371
    # Nothing to gain where a latent is no wider than a head.
    assert Expansion(64, 64, 128, 128, 2).fewest_queries == math.inf


def test_without_a_low_rank_of_queries_and_with_a_scale_of_the_rope() -> None:
    for overrides in ({"q_lora_rank": None}, {"rope_parameters": YARN}):
        plain = tiny_model("youtu", **overrides)
        runner = paged_runner(plain)
        assert keeps_latents(runner)
        check_rows(plain, runner, tolerance=1e-4)


def test_transformers_own_calls_expand_as_before() -> None:
    plain = tiny_model("youtu")
    model = paged_runner(plain).model
    model.set_attn_implementation("eager")
    tokens = torch.arange(2, 12)[None]
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("what", ["queries", "output"])
def test_other_numbers_are_noticed_and_keys_and_values_are_kept(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads in another order: of the queries, and of the outputs."""
    own = getattr(Latents, what)

    def moved(self: Latents, *args: Tensor) -> Any:
        return own(self, *args).flip(1)

    monkeypatch.setattr(Latents, what, moved)
    plain = tiny_model("youtu")
    with caplog.at_level(logging.INFO):
        runner = paged_runner(plain)
    messages = [message for message in caplog.messages if "latent attention" in message]
    assert len(messages) == 1 and "kept of every head" in messages[0] and "differ by" in messages[0]
    assert not keeps_latents(runner)
    check_rows(plain, runner)


def test_layers_that_expand_in_their_forward_keep_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in earlier versions of transformers."""
    monkeypatch.setattr(latent, "EXPAND", "no_such_method")
    plain = tiny_model("youtu")
    runner = paged_runner(plain)
    assert not any(rules.is_latent for rules in runner._shapes.rules.values())
    check_rows(plain, runner)


def test_a_thousand_tokens_of_deepseek_v3_take_70_megabytes() -> None:
    """61 layers of 512 + 64 numbers of two bytes, whole on every rank; all heads' would take 5 GB."""
    size = model_size("v3", DeepseekV3Config(), 2)
    assert 1000 * size.cache_bytes_per_token(1) == 1000 * 61 * (512 + 64) * 2 == 70_272_000
    assert size.cache_bytes_per_token(8) == size.cache_bytes_per_token(1)
    assert size.cache_read_bytes(8, 1000) == 70_272_000
    assert size.tp_sizes(16) == [1, 2, 4, 8, 16]
    # Scores over 576 numbers and sums of 512, of 128 heads.
    assert size.attention_flops(8, 1000) == 2 * 128 / 8 * (576 + 512) * 1000 * 61
    # Chunks of 2,000 tokens after 3,000: latents of 4,000 tokens, as seen on average, are expanded; those of
    # the chunk's own tokens were counted among the layers' products.
    assert size.attention_flops(8, 3000, 300) == size.attention_flops(8, 3000)
    pairs, expanded = 2000 * 3000.5 * (192 + 128), (4000 - 2000) * 512 * 256
    assert size.attention_flops(8, 3000, 2000) * 2000 == 2 * 128 / 8 * (pairs + expanded) * 61
    # Of each: keys written, joined, written and read, values written and read.
    moved = 4000 * (4 * 192 + 2 * 128) * 2 * 128 / 8 * 61
    assert size.cache_read_bytes(8, 3000, 2000) == 3 * 70_272_000 + moved
    limits = PassLimits(num_tokens=2048, num_logits=1, num_seqs=1, max_seq_len=100_000)
    assert expanded_bytes(size, limits) == MAX_EXPANDED_BYTES > 100_000 * (320 + 128) * 2
    assert expanded_bytes(size, dataclasses.replace(limits, max_seq_len=10**6)) == 10**6 * (320 + 128) * 2
    assert expanded_bytes(size, dataclasses.replace(limits, num_tokens=256)) == 0
    assert 4.9e9 < 1000 * 61 * 128 * (192 + 128) * 2 < 5.1e9


def saved_blocks(folder: Path) -> PreTrainedModel:
    """A checkpoint in blocks of FP8; returns the plain model that it was made of."""
    sizes = {"intermediate_size": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes |= {"head_dim": 32, "kv_lora_rank": 32}
    model = tiny_model("youtu", **sizes)
    model.save_pretrained(folder)
    write(folder, *LAYOUTS[BLOCKS])
    return model


def test_quantised_projections_from_latents_become_plain_ones(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    saved_blocks(tmp_path)
    checkpoint = open_checkpoint("--target", str(tmp_path))
    model = load_whole(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    for layer in model.model.layers:
        attention = layer.self_attn
        assert type(attention.kv_b_proj) is torch.nn.Linear
        assert isinstance(attention.q_b_proj, QuantizedLinear)
    runner = ModelRunner(copy.deepcopy(model), torch.device("cpu"), Acceleration())
    assert keeps_latents(runner)
    check = check_loading(
        model, checkpoint, dtype=torch.float32, device=torch.device("cpu"), vocab_size=VOCAB_SIZE
    )
    assert check.is_checked and check.quantity, check.reason
    # What stays quantised is counted as such, and the others as plain numbers.
    quantization = quantization_of(checkpoint)
    size = model_size("youtu", plain_config(checkpoint), 4, quantization=quantization)
    held = sum(
        layer.weight.numbers.numel() for layer in model.modules() if isinstance(layer, QuantizedLinear)
    )
    assert size.num_quantized_on(1) == held
    with torch.inference_mode():
        expected = logits_of_expanded(model)
    assert relative_difference(logits_of(model, TOKENS), expected) < ROUNDED_TOLERANCE


def logits_of_expanded(model: PreTrainedModel) -> Tensor:
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    logits: Tensor = model(TOKENS[None]).logits[0]
    return logits
