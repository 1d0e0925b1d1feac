"""Llama-like models without transformers' Python: the same numbers, the same memory, and no other models."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from specdist.models.adapters import use_paged_attention
from specdist.models.attention import AttentionRules
from specdist.models.llama import (
    LlamaPass,
    Product,
    UnknownStructureError,
)
from specdist.models.runner import Acceleration, ModelRunner
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError
from tests.engine.harness import Harness, requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.chunks import MIXED, GrowingRows
from tests.models.families import FAMILIES, LLAMA_LIKE, tiny_model

CPU = torch.device("cpu")
# float32 sums in another order; the logits are of order 1 to 10.
TOLERANCE = 5e-5
NOT_COMPILED = Acceleration()


def paged(model: PreTrainedModel) -> PreTrainedModel:
    copied = copy.deepcopy(model)
    use_paged_attention(copied)
    return copied


def has_pass(runner: ModelRunner) -> bool:
    return runner.own_pass is not None or runner._compiled is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_half_precision_is_rounded_as_by_transformers(family: str, dtype: torch.dtype) -> None:
    """Parity in float32 is in test_parity.py. Here a rounding left out or added would show: products and
    their sums are those of the same library."""
    plain = tiny_model(family).to(dtype)
    runners = [
        ModelRunner(paged(plain), CPU, NOT_COMPILED, model_impl=impl) for impl in ("specdist", "transformers")
    ]
    passes = [GrowingRows(plain, MIXED, page_size=4).run(runner) for runner in runners]
    for (found, _), (wanted, _) in zip(*passes, strict=True):
        # A product of packed matrices may be split otherwise: one unit in the last place, here and there.
        assert (found == wanted).double().mean() > 0.9
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_keep_transformers_layers(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = paged(tiny_model(family))
    with caplog.at_level(logging.INFO):
        assert has_pass(ModelRunner(model, CPU)) == (family in LLAMA_LIKE)
    assert len(caplog.messages) == 1 and f"layers of {family} by " in caplog.messages[0]
    assert not has_pass(ModelRunner(model, CPU, model_impl="transformers"))
    if family not in LLAMA_LIKE:
        with pytest.raises(UserError, match=rf"--model_impl specdist: .*\({family}\).*use --model_impl auto"):
            ModelRunner(model, CPU, model_impl="specdist")


class HalvedLinear(nn.Linear):
    """A layer that is linear, and not plainly so."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(input)


class HalvedAttention(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return 0.5 * output, weights


def halve_residual(model: PreTrainedModel) -> None:
    """The same parts with another factor, as in Granite: only the numbers can tell."""
    model.model.layers[1].self_attn.__class__ = HalvedAttention


def replace_linear(model: PreTrainedModel) -> None:
    model.model.layers[2].mlp.up_proj.__class__ = HalvedLinear


def add_part(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.register_module("gate", nn.Linear(1, 1))


def bias_one(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj.bias = nn.Parameter(torch.ones(attention.k_proj.out_features))


@pytest.mark.parametrize("change", [halve_residual, replace_linear, add_part, bias_one])
def test_a_model_that_computes_something_else_keeps_its_layers(
    change: Callable[[PreTrainedModel], None],
) -> None:
    plain = tiny_model("llama")
    change(plain)
    runner = ModelRunner(paged(plain), CPU)
    assert not has_pass(runner)
    for found, wanted in GrowingRows(plain, MIXED, page_size=4).run(runner):
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("change", [replace_linear, add_part, bias_one])
def test_structures_that_are_not_known(change: Callable[[PreTrainedModel], None]) -> None:
    """They are refused before anything is packed or run."""
    model = paged(tiny_model("llama"))
    rules = AttentionRules(scale=None, window=None, softcap=None)
    LlamaPass(model, dict.fromkeys(range(3), rules))
    change(model)
    with pytest.raises(UnknownStructureError):
        LlamaPass(model, dict.fromkeys(range(3), rules))


def test_weights_are_packed_once_and_shared() -> None:
    """Of two runners, and of transformers: no second copy, and what is written to one is read by all."""
    model = paged(tiny_model("qwen2"))
    ModelRunner(model, CPU, NOT_COMPILED)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    parts = [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
    addresses = [part.weight.data_ptr() for part in parts]
    assert addresses[1] == addresses[0] + attention.q_proj.weight.nbytes
    assert addresses[4] == addresses[3] + mlp.gate_proj.weight.nbytes
    second = ModelRunner(model, CPU, NOT_COMPILED)
    assert [part.weight.data_ptr() for part in parts] == addresses
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    for found, wanted in GrowingRows(plain, MIXED, page_size=4).run(second):
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_draft_that_is_the_target_is_accepted(family: str, temperature: float) -> None:
    model = tiny_model(family)
    harness = Harness(model, model, settings=SamplingSettings(temperature=temperature), num_draft_tokens=4)
    assert all(has_pass(runner) for runner in harness.runners)
    harness.generate(requests_for(prompts_of_lengths(5, 23, 11)))
    stats = harness.stats_recorder.close_shard(0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 100])
def test_large_products_are_the_same_by_any_library(num_tokens: int, bias: bool, is_copied: bool) -> None:
    """Below and above the sizes from which oneDNN is used, on both layouts of the weights."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(256, width, bias=bias) for width in (512, 256, 256)]
    x = torch.randn(num_tokens, 256, generator=generator)
    with torch.inference_mode():
        expected = torch.cat([layer(x) for layer in layers], dim=1)
        found = Product(*layers, is_copied=is_copied)(x, num_tokens)
    # Sums of 256 products of order 1, in another order.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
