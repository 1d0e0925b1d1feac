"""Keys and values in 8 bits: what is read is what is nearest, of the same token and head, wherever it has
been copied; and the logits are those of attention to such keys and values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from specdist.models.attention import expansion
from specdist.models.cache.key_value import KeyValueCache, LayerShape, from_float8, to_float8
from specdist.models.passes.acceleration import Acceleration
from tests.engine.harness import page_bytes, paged_runner
from tests.models.chunks import check_rows
from tests.models.families import tiny_model
from tests.models.kernels import PlainKernel

# A number that lies between two others in one of two sums goes to another of them: rarely, and on some
# processors more often (3.5e-3 was seen).
TOLERANCE = 5e-3
NARROW = Acceleration(has_float8_cache=True)
STATIC = Acceleration(has_float8_cache=True, is_static=True)
KERNEL = Acceleration(has_float8_cache=True, is_static=True, kernels=(PlainKernel(),))


def rounded(tokens: Tensor) -> Tensor:
    """The nearest numbers of float8_e4m3fn (arXiv:2209.05433, table 1) with a scale of each head, [.., D],
    whose largest number is 448."""
    numbers = tokens.double()
    scales = (numbers.abs().amax(-1, keepdim=True) / 448).bfloat16().double()
    shares = numbers / scales.masked_fill(scales == 0, 1)
    # Steps of an eighth of the power of two below, and none smaller than 2^-9.
    steps = 2.0 ** (shares.abs().clamp_min(2.0**-6).log2().floor() - 3)
    return ((shares / steps).round() * steps).clamp(-448, 448).mul(scales).to(tokens.dtype)


def test_numbers_become_the_nearest_with_a_scale_of_each_head() -> None:
    """However far apart tokens and heads are in size; the largest is kept up to the scale's rounding."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(200, 3, 20, generator=generator)
    tokens *= torch.exp(6 * torch.randn(200, 3, 1, generator=generator))
    tokens[0, 0] = 0
    found = from_float8(*to_float8(tokens), torch.float32)
    torch.testing.assert_close(found, rounded(tokens), rtol=1e-6, atol=0)
    error = (found - tokens).abs().amax(-1) / tokens.abs().amax(-1).clamp(min=1e-30)
    assert float(error.max()) < 16.5 / 448
    for wrong in (torch.inf, torch.nan):
        tokens[1, 1, 3] = wrong
        found = from_float8(*to_float8(tokens), torch.float32)
        assert not found[1, 1].isfinite().all() and found[1, 0].isfinite().all(), "it is not hidden"


@contextlib.contextmanager
def rounding(model: PreTrainedModel) -> Iterator[None]:
    """transformers' own attention to rounded keys and values; of latents, to what is made of rounded ones."""
    own = {"llama": eager_attention_forward}
    module = __import__(type(model).__module__, fromlist=["eager_attention_forward"])
    forward = getattr(module, "eager_attention_forward", own["llama"])
    layers = [layer for layer in model.modules() if hasattr(layer, "kv_lora_rank")]

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not layers:
            key, value = rounded(key), rounded(value)
        return forward(layer, query, key, value, *args, **kwargs)

    AttentionInterface.register("rounded", attend)
    AttentionMaskInterface.register("rounded", eager_mask)
    for layer in layers:
        expand = type(layer).expand_kv

        def expanded(latent: Tensor, rotated: Tensor, *, layer: Any = layer, expand: Any = expand) -> Any:
            kept = rounded(torch.cat((latent, rotated), -1))
            return expand(layer, *kept.split([latent.shape[-1], rotated.shape[-1]], -1))

        layer.expand_kv = expanded
    model.set_attn_implementation("rounded")
    try:
        yield
    finally:
        model.set_attn_implementation("eager")
        for layer in layers:
            del layer.expand_kv


@pytest.mark.parametrize(
    ("family", "acceleration", "is_windowed"),
    [
        ("llama", NARROW, False),
        ("llama", KERNEL, False),
        ("gemma2", STATIC, True),
        ("granite_swa", NARROW, True),
        ("youtu", STATIC, False),
    ],
)
def test_logits_are_those_of_rounded_keys_and_values(
    family: str, acceleration: Acceleration, is_windowed: bool
) -> None:
    """With sinks, soft caps, windowed layers with pages of their own, latents, and recorded passes."""
    plain = tiny_model(family)
    runner = paged_runner(plain, acceleration)
    with rounding(plain):
        check_rows(plain, runner, tolerance=TOLERANCE, is_windowed=is_windowed)
    with pytest.raises(AssertionError):  # the rounding is far above the tolerance
        check_rows(plain, paged_runner(plain, acceleration), tolerance=2 * TOLERANCE)


def test_latents_are_expanded_from_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "OPERATIONS_PER_BYTE", 0)
    plain = tiny_model("youtu", kv_lora_rank=64)
    runner = paged_runner(plain, NARROW)
    with rounding(plain):
        check_rows(plain, runner, tolerance=TOLERANCE)


def test_a_page_takes_a_byte_for_a_number_and_two_for_a_scale() -> None:
    for family, numbers, scales in (("llama", 2 * 2 * 16, 2 * 2), ("youtu", 24 + 8, 1)):
        runner = paged_runner(tiny_model(family), NARROW)
        assert page_bytes(runner, 4) == 3 * 4 * (numbers + 2 * scales), family


def test_copies_take_their_scales_along() -> None:
    """As a branch takes the first tokens of its page, and a row those of its branch."""
    shapes = {0: LayerShape(2, 8, 8), 1: LayerShape(2, 8, 6), 2: LayerShape(1, 8, 6, is_latent=True)}
    cache = KeyValueCache(
        shapes, num_pages=4, page_size=4, dtype=torch.float32, device=torch.device("cpu"), is_float8=True
    )
    generator = torch.Generator().manual_seed(0)
    places, targets = torch.arange(5), torch.tensor([9, 15, 11, 8, 12])
    sizes = 10.0 ** torch.arange(5)[:, None, None]
    written = {}
    for layer, shape in shapes.items():
        keys, values = (
            sizes * torch.randn(5, shape.num_heads, width, generator=generator)
            for width in (shape.width, shape.value_width)
        )
        cache.write(layer, places, keys, values)
        written[layer] = (keys, keys[..., :6] if shape.is_latent else values)
    cache.copy_tokens(places, targets)
    for layer, shape in shapes.items():
        for tokens, reads_values in zip(written[layer], (False, True), strict=True):
            if shape.is_latent and reads_values:
                continue
            read = cache.read(layer, slice(None), reads_values=reads_values)
            found = read.view(16, shape.num_heads, -1)[targets]
            torch.testing.assert_close(found, rounded(tokens), rtol=1e-6, atol=0)
