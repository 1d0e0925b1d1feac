"""Fused layers in whole models: the same numbers, only inside of passes, and only where the formula is the
same."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels import layers, rotary
from specdist.models.attention.attention import AttentionCall, AttentionRules, attending
from specdist.models.attention.kernel import KernelAttention
from specdist.models.batch.flat import PagedSegments
from specdist.models.cache import key_value
from specdist.models.families.adapters import use_paged_attention
from specdist.models.families.dry_run import LayerShapes, recording
from specdist.models.passes import fusing
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.all_reduce import SUMMING
from specdist.models.passes.fused_modules import FusedRouter
from specdist.models.passes.fusing import FusedLayers
from specdist.models.passes.hidden import LastHiddenStates
from specdist.models.passes.runner import ModelRunner
from tests.engine.harness import paged_runner
from tests.models.all_families import build
from tests.models.chunks import check_rows
from tests.models.families import tiny_model
from tests.models.kernels import PlainKernel

FUSED = {"llama", "qwen3", "gemma2", "granite_swa", "youtu"}
# Few tokens: each is a program of its own in Triton's interpreter.
NUM_LAYERS, NUM_TOKENS = 3, 2
# Norms of a layer; besides them each model has one at its end.
NUM_NORMS = {"qwen3": 4, "gemma2": 4, "youtu": 4}
PARTLY_ROTATED = {"youtu"}
# Layers of a layer whose products are joined, also where nothing else is fused.
NUM_JOINED = dict.fromkeys(FUSED, 5) | {"youtu": 2, "phi": 3, "gpt_neo": 3}
# Of the largest logit: sums of norms in another order. In bfloat16 nearly all round to the same number.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
# One family of each structure and formula; where a formula rounds shows in bfloat16.
CASES = [(family, torch.float32) for family in ("llama", "granite_swa", "youtu", "phi", "gpt2", "gpt_neo")]
CASES += [(family, torch.bfloat16) for family in ("qwen3", "gemma2")]


def logits_of(model: PreTrainedModel) -> Tensor:
    tokens = torch.arange(2, 2 + NUM_TOKENS, device=model.device)[None]
    shapes = LayerShapes()
    with torch.no_grad(), recording(model, shapes), attending(shapes, {}):
        logits: Tensor = model(input_ids=tokens, position_ids=tokens - 2, use_cache=False).logits
    return logits


def paged_model(family: str, device: torch.device, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    model = tiny_model(family, **options).to(device, dtype)
    use_paged_attention(model)
    # transformers leaves the weights of norms at 1, or 0.
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.data += noise.to(device, dtype)
    return model


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_every_family_keeps_its_logits(
    family: str, dtype: torch.dtype, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = paged_model(family, device, dtype)
    expected = logits_of(model)
    with caplog.at_level(logging.INFO, "specdist"):
        fused = FusedLayers(model, device, dtype)
    (message,) = caplog.messages
    number = {what.split(" of ")[0]: count for what, count in fused.num_fused.items()}
    assert number.pop("joined product", 0) == NUM_LAYERS * NUM_JOINED.get(family, 0)
    if family in FUSED:
        assert number == {
            "residual and norm": NUM_LAYERS,
            "RMS norm": NUM_LAYERS * NUM_NORMS.get(family, 2) + 1,
            # A part of a head of latent attention is rotated.
            **({} if family in PARTLY_ROTATED else {"rotary embedding": NUM_LAYERS}),
            "gated activation": NUM_LAYERS,
        }
        assert f"{NUM_LAYERS} × gated activation" in message
        assert ("does not rotate whole heads" in message) == (family in PARTLY_ROTATED)
    else:
        assert not number
    assert torch.equal(logits_of(model), expected), "other code that shares the model"
    with fused.active(), LastHiddenStates(model) as caught:
        found = logits_of(model)
    assert caught.hidden_NH.shape == (NUM_TOKENS, 64)
    assert (found - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()
    assert torch.equal(logits_of(model), expected)


def counted(called: list[str], name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """It adds its name to those that were called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return operator(*args, **kwargs)

    return call


def test_a_runners_passes_are_fused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dry run already calls each kernel, once for every place that has it."""
    called: list[str] = []
    for name in ("rms_norm", "residual_norm", "rotary", "gated_activation"):
        owner = rotary if name == "rotary" else layers
        monkeypatch.setattr(owner, name, counted(called, name, getattr(owner, name)))
    model = paged_model("llama", device, torch.float32)
    runner = ModelRunner(model, device, Acceleration(is_fused=True))
    trials = len(called)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    runner.torch_pass.compute(index, index, index, LayerShapes())
    counts = {name: called[trials:].count(name) for name in called}
    # Of the norms the first alone has no residual before it.
    assert counts == {"rms_norm": 1, "residual_norm": 6, "rotary": 3, "gated_activation": 3}
    ModelRunner(model, device, Acceleration())
    assert len(called) == trials + 13, "a second runner without fusing"
    second = ModelRunner(model, device, Acceleration(is_fused=True))
    trials = len(called)
    second.torch_pass.compute(index, index, index, LayerShapes())
    assert len(called) == trials + 13, "two runners of one model"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By what keys and values are written, in their order; by the kernels that devices have."""
    names: list[str] = []
    kernels = {name: counted(names, name, getattr(rotary, f"write_{name}")) for name in ("tokens", "rotated")}
    monkeypatch.setattr(key_value, "writer_on", lambda *_: key_value.Writer(*kernels.values()))
    return names


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rotated_keys_are_written_once(family: str, written: list[str], device: torch.device) -> None:
    """By the kernel that rotates them, for whole passes of the right logits, also into pages of layers with
    windows."""
    plain = tiny_model(family, num_hidden_layers=2)
    runner = paged_runner(plain, Acceleration(is_fused=True, kernels=[PlainKernel()]), device=device)
    check_rows(plain, runner, [{0: 3}, {0: 5, 2: 1}], is_windowed=family == "gemma2")
    assert written == 4 * ["rotated"]


def test_other_keys_than_those_that_were_written_are_written(
    written: list[str], device: torch.device
) -> None:
    """Where a layer makes something else of them."""
    cache = key_value.KeyValueCache(
        {0: key_value.LayerShape(2, 8, 8)}, num_pages=2, page_size=4,
        dtype=torch.float32, device=device,
    )  # fmt: skip
    keys, values, queries = torch.randn(3, 1, 2, 8, device=device)
    index_T = torch.tensor([5], device=device)
    numbers = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([[0, 1]], [6], [0, 1]))
    attention = KernelAttention(cache, PlainKernel(), PagedSegments(*numbers, 1, 8), index_T)
    rules = AttentionRules(None, None, None)
    for change, expected in ((0.0, []), (1.0, ["tokens"])):
        written.clear()
        rotated = attention.rotate(0, keys, values, queries, *torch.ones(2, 1, 8, device=device))
        assert rotated is not None
        own = rotated[1] + change if change else rotated[1].transpose(0, 1).transpose(0, 1)
        attention.attend(0, AttentionCall(rotated[0], own, values, rules))
        assert written == ["rotated", *expected]
        assert torch.equal(cache.pages(0)[0].view(8, 2, 8)[5], own[0])


def test_a_norm_is_done_by_the_layer_before_where_it_is_that_of_what_the_layer_gives(
    device: torch.device,
) -> None:
    """Not of another form, and not of what somebody has made of it on the way."""
    model = paged_model("llama", device, torch.float32)
    model.model.norm.variance_epsilon = 0.3
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 2 + 1, *args[1:]))
    # What attention gives is not seen here, so what it reads is.
    read: list[torch.Tensor] = []
    projection = model.model.layers[1].self_attn.q_proj
    projection.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    expected = logits_of(model)
    with FusedLayers(model, device, torch.float32).active():
        found = logits_of(model)
    assert (found - expected).abs().max() <= TOLERANCES[torch.float32] * expected.abs().max()
    torch.testing.assert_close(read[1], read[0])


def test_a_copy_of_a_model_has_its_own_weights(device: torch.device) -> None:
    model = paged_model("qwen3", device, torch.float32)
    FusedLayers(model, device, torch.float32)
    copied = copy.deepcopy(model)
    expected = logits_of(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(logits_of(copied), expected)
    # What changes in the copy holds in its passes.
    for parameter in copied.parameters():
        parameter.data.mul_(1.1)
    expected, fused = logits_of(copied), FusedLayers(copied, device, torch.float32)
    with fused.active():
        assert (logits_of(copied) - expected).abs().max() <= TOLERANCES[torch.float32] * expected.abs().max()


class Siblings(nn.Module):
    """Layers of the names of queries, keys and values, which may read different inputs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, width, device=device) for width in (6, 4, 2))


def test_layers_are_joined_where_they_read_the_same_input(device: torch.device) -> None:
    """Their parameters take no more memory, and are still their own; an input that has changed since is read
    again, and layers of which one reads another input go on alone."""
    torch.manual_seed(0)
    layers = Siblings(device)
    fused = FusedLayers(layers, device, torch.float32)
    storages = {layer.weight.untyped_storage().data_ptr() for layer in layers.children()}
    assert fused.num_fused == {"joined product of Linear": 3} and len(storages) == 1
    first, second = torch.randn(2, 1, 5, 8, device=device)
    joined = layers.joined_q_proj
    with torch.no_grad(), fused.active():
        for inputs in (first, second, second.mul_(2)):
            for layer in layers.children():
                expected = nn.functional.linear(inputs, layer.weight, layer.bias)
                assert torch.allclose(layer(inputs), expected, atol=1e-6)
        assert joined.is_used
        for inputs, layer in ((first, layers.q_proj), (second, layers.k_proj), (second, layers.v_proj)):
            assert torch.allclose(
                layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias), atol=1e-6
            )
        assert not joined.is_used
        layers.q_proj.weight.data.zero_()
        assert torch.equal(layers.q_proj(first), layers.q_proj.bias.expand(1, 5, 6))


class OtherActivation(nn.Module):
    """GELU by the error function, which differs from that by tanh by less than bfloat16 shows."""

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.gelu(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_formula_stays_as_it_is(
    dtype: torch.dtype, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = paged_model("gemma", device, dtype)
    for layer in model.model.layers:
        layer.mlp.act_fn = OtherActivation()
        layer.input_layernorm.__class__ = ShiftedRMSNorm
    expected = logits_of(model)
    with caplog.at_level(logging.INFO, "specdist"):
        fused = FusedLayers(model, device, dtype)
    assert set(fused.num_fused) == {
        "RMS norm of GemmaRMSNorm", "rotary embedding of GemmaAttention", "joined product of Linear",
    }  # fmt: skip
    assert "its norms are of several kinds" in caplog.text
    assert fused.num_fused["RMS norm of GemmaRMSNorm"] == NUM_LAYERS + 1
    with fused.active():
        assert (logits_of(model) - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


class ShiftedRMSNorm(nn.Module):
    eps: float
    weight: nn.Parameter

    def forward(self, inputs: Tensor) -> Tensor:
        shifted = inputs.float() - inputs.float().mean(-1, keepdim=True)
        normed = shifted * torch.rsqrt(shifted.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight.float())).type_as(inputs)


class ScaledLayer(LlamaDecoderLayer):
    """As in Granite: what attention gives is scaled before it is added."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + 0.98 * attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class SilentLayer(LlamaDecoderLayer):
    """Its attention is not told of positions."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, **(kwargs | {"position_ids": None}))


@pytest.mark.parametrize(
    ("layer_class", "reason"),
    [(ScaledLayer, "its numbers differ by"), (SilentLayer, "it hands other things to its attention")],
)
def test_a_layer_of_another_structure_stays_as_it_is(
    layer_class: type[nn.Module], reason: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = paged_model("llama", device, torch.float32)
    for layer in model.model.layers:
        layer.__class__ = layer_class
    expected = logits_of(model)
    with caplog.at_level(logging.INFO, "specdist"):
        fused = FusedLayers(model, device, torch.float32)
    assert "RMS norm of LlamaRMSNorm" in fused.num_fused
    assert f"{layer_class.__name__}: {reason}" in caplog.text
    with fused.active():
        assert torch.allclose(logits_of(model), expected, atol=1e-5)


def test_projections_are_not_tried(device: torch.device) -> None:
    """They may communicate, and ranks that share a model may try other things at other times."""
    model = paged_model("llama", device, torch.float32)

    def fail(*_: Any) -> None:
        raise AssertionError("a projection was called")

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(fail)
    assert FusedLayers(model, device, torch.float32).num_fused.total() == 31


def test_a_kernel_that_raises_or_is_wrong_is_left_out(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("no such instruction\nat line 3")

    own = layers.rms_norm
    monkeypatch.setattr(layers, "gated_activation", fail)
    monkeypatch.setattr(layers, "rms_norm", lambda *args, **kwargs: own(*args, **kwargs) + 0.1)
    model = paged_model("llama", device, torch.float32)
    expected = logits_of(model)
    with caplog.at_level(logging.INFO, "specdist"):
        fused = FusedLayers(model, device, torch.float32)
    assert dict(fused.num_fused) == {"joined product of Linear": 15, "rotary embedding of LlamaAttention": 3}
    assert "LlamaMLP: RuntimeError: no such instruction" in caplog.text
    assert "LlamaRMSNorm: its numbers differ by 0.0999" in caplog.text
    assert "LlamaDecoderLayer: its norms are of several kinds, or not fused" in caplog.text
    with fused.active():
        assert torch.allclose(logits_of(model), expected, atol=1e-5)


def test_without_triton_nothing_is_fused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "specdist.kernels.layers", None)
    monkeypatch.delattr("specdist.kernels.layers")
    model = paged_model("llama", device, torch.float32)
    expected = logits_of(model)
    fused = FusedLayers(model, device, torch.float32)
    assert "plain operations" in caplog.text and not fused.num_fused
    with fused.active():
        assert torch.equal(logits_of(model), expected)


ROUTERS = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "mistral4")


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_choose_what_their_own_code_does(
    family: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek's of two groups of three. One that rounds its scores to half precision stays as it is, and so
    do all where ranks differ."""
    monkeypatch.setattr(fusing, "NUM_TOKENS", 3)
    sizes = {"num_experts": 12, "num_local_experts": 12, "n_group": 3, "topk_group": 2}
    model = build(family, num_experts_per_tok=3, **sizes).to(device, torch.bfloat16)
    router = next(each for each in model.modules() if hasattr(each, "top_k") and hasattr(each, "weight"))
    for buffer in router.buffers():
        buffer.copy_(torch.linspace(-0.2, 0.1, len(buffer)))
    with caplog.at_level(logging.INFO, "specdist"):
        fused = FusedLayers(router, device, torch.bfloat16)
    is_fused = family != "mistral4"
    assert list(fused.num_fused.values()) == [1] * is_fused
    assert ("or its weights are of another form" in caplog.text) == (not is_fused)
    hidden_TH = torch.randn(5, 128, device=device).bfloat16()
    logits, weights, ids = router(hidden_TH)
    with fused.active():
        found = router(hidden_TH)
    assert torch.equal(found[0].float(), logits.float()) and found[1].dtype == weights.dtype
    assert torch.equal(found[2].sort().values, ids.sort().values)
    assert torch.allclose(found[1].sort().values, weights.sort().values, rtol=1e-5)
    vars(router)[SUMMING] = SimpleNamespace(agree=lambda *_: False)
    FusedLayers(router, device, torch.bfloat16)
    assert not isinstance(router.forward, FusedRouter) or router.forward.switch is fused
