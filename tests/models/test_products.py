"""The way of a model's products of few tokens: by the kernel where it is right and faster."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels import products as kernels
from specdist.models.passes import products
from specdist.models.passes.all_reduce import Sums
from specdist.models.passes.fused_modules import JoinedProjections
from specdist.models.passes.fusing import FusedLayers
from specdist.models.passes.products import KERNEL, TORCH, choose_products
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.quantized.quantized_weights import LayerFormat, quantize
from tests.kernels.test_fusing import NUM_TOKENS, logits_of, paged_model

CPU, WIDTH, NUM_LAYERS = torch.device("cpu"), 256, 2
FORM = LayerFormat(numbers="float8", rows=1, columns=None, activations="token")
JOINED, PLAIN, NARROW = KINDS = f"192 × {WIDTH}", f"100 × {WIDTH}", f"80 × {WIDTH}, {FORM}"


class Layers(nn.Module):
    """Plain, joined and quantised ones; two of a kind, and one that is small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, size in {"first": 100, "second": 100, "q_proj": 128, "k_proj": 64, "small": 8}.items():
            setattr(self, name, nn.Linear(WIDTH, size, dtype=torch.bfloat16))
        self.joined_q_proj = JoinedProjections([self.q_proj, self.k_proj])
        for layer in (self.q_proj, self.k_proj):
            layer.forward = products.FusedProjection(*[None] * 6)  # type: ignore[arg-type, assignment]
        self.narrow, weight = QuantizedLinear(FORM, 80, WIDTH), quantize(FORM, torch.randn(80, WIDTH))
        self.narrow.numbers, self.narrow.scales = weight.numbers, weight.scales_AB

    def outputs(self, num_tokens: int) -> list[Tensor]:
        x = torch.randn(1, num_tokens, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
        layers = (self.first, self.second, self.small, self.narrow)
        with torch.no_grad():
            return [*(layer(x) for layer in layers), *(self.joined_q_proj.of(index, x) for index in (0, 1))]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that the kernel is given. After a first of -1 a single number is wrong."""
    found, own = list[int](), kernels.few_tokens_product

    def counted(x_TK: Tensor, *args: Any, **options: Any) -> Tensor:
        found.append(len(x_TK))
        output = own(x_TK, *args, **options)
        if found[0] < 0 and output.shape == (4, 100):
            output[3, 99] += 1.0
        return output

    monkeypatch.setattr(kernels, "few_tokens_product", counted)
    monkeypatch.setattr(products, "NUM_TOKENS", (1, 2, 4))
    monkeypatch.setattr(products, "MIN_WEIGHTS", 80 * WIDTH)
    return found


def measured(*gains: float) -> Callable[[Any], float]:
    """Torch's seconds over the kernel's, for each number of tokens of each kind; the first turn is slow."""
    times = iter([each for gain in gains for each in (gain + 7, 9.0, gain, 1.0)])
    return lambda run: (run(), next(times))[1]


def never(_: object) -> float:
    raise AssertionError("a choice that is known is not measured")


def test_the_kernel_is_used_where_it_is_right_and_clearly_faster(
    launches: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    layers, options = Layers(), {"dtype": torch.bfloat16, "device": CPU}
    expected = {num_tokens: layers.outputs(num_tokens) for num_tokens in (1, 2, 3, 5)}
    gains = (1.2, 1.2, 0.5, 0.9, 1.03, 1.2, 1.2, 1.2, 1.2)
    with caplog.at_level(logging.INFO, "specdist"):
        choice = choose_products(layers, **options, measure=measured(*gains))
    assert choice == {
        JOINED: [(2, KERNEL), (4, TORCH)], PLAIN: [(2, TORCH), (4, KERNEL)], NARROW: [(4, KERNEL)]
    }  # fmt: skip
    assert (
        f"few tokens: {JOINED} by split inputs up to 2 tokens, {PLAIN} by split inputs up to 4" in caplog.text
    )
    # The quantised layer, the joined ones of up to 2 tokens, and both plain ones of more; of 5 none.
    for num_tokens, num_launches in {1: 2, 2: 2, 3: 3, 5: 0}.items():
        launches.clear()
        found = layers.outputs(num_tokens)
        assert launches == [num_tokens] * num_launches
        for mine, own in zip(found, expected[num_tokens], strict=True):
            assert mine.shape == own.shape and torch.allclose(mine, own, atol=0.1, rtol=0.02)
    assert choose_products(layers, **options, measure=never) is choice, "of another runner"
    assert choose_products(nn.ModuleList(layers.children()), **options, measure=never) == {}, "shared"


def test_a_run_that_goes_on_keeps_its_choice_but_for_a_kernel_that_is_wrong_here(
    launches: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    frozen = {kind: [[2, TORCH], [4, KERNEL]] for kind in KINDS}
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CPU, "frozen": frozen, "measure": never}
    assert choose_products(Layers(), **options) == frozen
    launches[:] = [-1]
    with caplog.at_level(logging.INFO, "specdist"):
        found = choose_products(Layers(), **options)
    assert found == frozen | {PLAIN: [(4, TORCH)]}
    assert f"; not used: split inputs: {PLAIN}: its numbers differ by" in caplog.text


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(
    ("family", "case"),
    [("llama", "right"), ("gemma2", "right"), ("llama", "wrong"), ("llama", "many"), ("llama", "summed")],
)
def test_what_follows_a_product_is_in_its_kernel(
    family: str, case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a whole model; not where its numbers are wrong. A residual and norms not for many tokens, not over
    ranks, and not where something else is made of a product."""
    calls, own = list[str](), kernels.few_tokens_product

    def counted(*args: Any, gate: int = 0, **options: Any) -> Tensor:
        is_wrong, is_normed = case == "wrong", "residual" in options
        calls.append("norm" if is_normed else "gate" if gate else "plain")
        return own(*args, gate=gate + (is_wrong and gate), **options) + float(is_wrong and is_normed)

    monkeypatch.setattr(kernels, "few_tokens_product", counted)
    monkeypatch.setattr(products, "NUM_TOKENS", (1, NUM_TOKENS))
    monkeypatch.setattr(products, "NUM_NORMED", (1, NUM_TOKENS)[: 1 if case == "many" else 2])
    monkeypatch.setattr(products, "MIN_WEIGHTS", 1)
    model = paged_model(family, CPU, torch.float32, num_hidden_layers=NUM_LAYERS)
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *args: 2 * args[2])
    expected = logits_of(model)
    fused, seconds = FusedLayers(model, CPU, torch.float32), itertools.cycle((2.0, 1.0))
    for layer in model.model.layers if case == "summed" else ():
        layer.forward.sums = Sums(None, {}, ())  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "specdist"):
        choice = choose_products(model, dtype=torch.float32, device=CPU, measure=lambda _: next(seconds))
    assert any("norm" in kind for kind in choice) == (case != "summed")
    assert ("residual and norm: its numbers differ by" in caplog.text) == (case == "wrong")
    with fused.active():
        logits_of(model)  # which shows what gives products
        calls.clear()
        found = logits_of(model)
    gate, norm = "plain" if case == "wrong" else "gate", "norm" if case == "right" else "plain"
    # Of a layer q, k and v; o; gate and up; and down. Then the head.
    layers = [["plain", norm if index != 1 else "plain", gate, norm] for index in range(NUM_LAYERS)]
    assert calls == [*itertools.chain(*layers), "plain"]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
