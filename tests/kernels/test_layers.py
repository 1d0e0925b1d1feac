"""The small steps of a layer: equal to float64, rounded as plain operations round, independent of other
rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels import layers
from specdist.kernels.layers import gated_activation, residual_norm, rms_norm
from specdist.kernels.rotary import rotary, write_rotated, write_tokens
from specdist.models.cache.key_value import plain_write

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
# Of |difference| / (1 + |number|) from float64: one rounding for each step that rounds.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NEARLY_ZERO = 1e-5
EPSILON = 1e-5
# With the formulas of the kernel: (module, weight_offset, rounds_first).
NORMS = {LlamaRMSNorm: (0.0, True), GemmaRMSNorm: (1.0, False), Olmo2RMSNorm: (0.0, False)}


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (2 * numbers).to(device, dtype)


def check(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    """Near to float64, and on nearly all places the number of plain operations."""
    assert found.dtype == plain.dtype and found.shape == plain.shape == exact.shape
    largest = ((found.double() - exact).abs() / (1 + exact.abs())).max()
    assert largest <= TOLERANCES[found.dtype]
    if found.dtype != torch.float32:
        # Where plain operations take a small difference of large numbers, these are nearer to float64.
        assert ((found - plain).abs() > NEARLY_ZERO).float().mean() <= 0.01


@pytest.mark.parametrize(
    ("module_class", "shape", "dtype"),
    [
        (LlamaRMSNorm, (1, 3, 100), BFLOAT16), (LlamaRMSNorm, (2, 1500), FLOAT32),
        (LlamaRMSNorm, (1, 7, 2, 64), FLOAT16), (GemmaRMSNorm, (2, 1500), BFLOAT16),
        (GemmaRMSNorm, (1, 1), FLOAT32), (Olmo2RMSNorm, (1, 7, 2, 64), BFLOAT16),
    ],
    ids=str,
)  # fmt: skip
def test_norms_are_those_of_transformers(
    module_class: type[torch.nn.Module], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Of whole rows and of heads; rows that fill no block, and one number."""
    weight_offset, rounds_first = NORMS[module_class]
    inputs = random(*shape, dtype=dtype, device=device)
    weight = random(shape[-1], dtype=dtype, device=device, seed=1)
    module = module_class(shape[-1], eps=EPSILON).to(device, dtype)
    module.weight.data = weight
    found = rms_norm(inputs, weight, epsilon=EPSILON, weight_offset=weight_offset, rounds_first=rounds_first)
    wide = inputs.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt() * (weight_offset + weight.double())
    check(found, exact, module(inputs).detach())


def test_a_norm_does_not_depend_on_other_rows(device: torch.device) -> None:
    """Bit by bit, wherever a row lies, also beside one that is not finite. Of the narrow rows there is one
    block and a part of another."""
    num_rows = 12
    for width in (64, 1500):
        inputs = random(num_rows, width, dtype=torch.bfloat16, device=device)
        inputs[5] = torch.nan
        weight = random(width, dtype=torch.bfloat16, device=device, seed=1)
        options = {"epsilon": EPSILON, "weight_offset": 0.0, "rounds_first": True}
        together = rms_norm(inputs, weight, **options)
        strided = torch.cat([inputs, inputs], dim=1)[:, :width]
        assert torch.equal(rms_norm(strided, weight, **options).nan_to_num(9.0), together.nan_to_num(9.0))
        # Heads of tokens, whose projections lie beside others.
        heads = strided.unflatten(0, (4, 3)).flatten(1).repeat(1, 2)[:, : 3 * width].view(1, 4, 3, width)
        found = rms_norm(heads, weight, **options)
        assert found.is_contiguous() and not heads.is_contiguous()
        assert torch.equal(found.view(num_rows, width).nan_to_num(9.0), together.nan_to_num(9.0))
        for row in range(num_rows):
            alone = rms_norm(inputs[row : row + 1], weight, **options)
            assert torch.equal(alone.nan_to_num(9.0)[0], together[row].nan_to_num(9.0))
            assert bool(alone.isnan().any()) == (row == 5)


@pytest.mark.parametrize(
    ("is_normed_before", "is_gemma", "shape", "dtype"),
    [
        (False, False, (1, 5, 100), BFLOAT16), (True, True, (13, 64), BFLOAT16),
        (False, True, (2, 1500), FLOAT16), (True, False, (2, 1500), FLOAT32),
    ],
    ids=str,
)  # fmt: skip
def test_a_residual_with_its_norms_is_what_they_are_alone(
    is_normed_before: bool, is_gemma: bool, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """To the last bit: the sum is rounded before it is normed. Other rows make no difference, also one that
    is not finite. The norms alone are compared with float64 above."""
    weight_offset, rounds_first = NORMS[GemmaRMSNorm if is_gemma else LlamaRMSNorm]
    inputs, residual = (random(*shape, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    before, weight = (random(shape[-1], dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    inputs.view(-1, shape[-1])[1] = torch.nan
    form = {"epsilon": EPSILON, "weight_offset": weight_offset, "rounds_first": rounds_first}
    sums = residual + (rms_norm(inputs, before, **form) if is_normed_before else inputs)
    found = residual_norm(inputs, residual, before if is_normed_before else None, weight, **form)
    for mine, plain in zip(found, (sums, rms_norm(sums, weight, **form)), strict=True):
        assert torch.equal(mine.nan_to_num(9.0), plain.nan_to_num(9.0))
        assert not mine.view(-1, shape[-1])[0].isnan().any()
    # As a projection of several heads may hand it over.
    strided = torch.cat([inputs, inputs], dim=-1)[..., : shape[-1]]
    again = residual_norm(strided, residual, before if is_normed_before else None, weight, **form)
    assert torch.equal(again[1].nan_to_num(9.0), found[1].nan_to_num(9.0))


def test_a_row_that_does_not_fit_is_refused(device: torch.device) -> None:
    inputs = torch.zeros(1, layers.MAX_NORM_WIDTH + 1, device=device)
    with pytest.raises(ValueError, match="residual of 32769 numbers"):
        residual_norm(inputs, inputs, None, inputs[0], epsilon=EPSILON, weight_offset=0.0, rounds_first=True)
    with pytest.raises(ValueError, match="32769 numbers"):
        rms_norm(inputs, inputs[0], epsilon=EPSILON, weight_offset=0.0, rounds_first=True)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "width", "dtype"),
    [(4, 2, 16, FLOAT32), (3, 3, 80, BFLOAT16), (7, 1, 64, FLOAT16), (1, 1, 2, BFLOAT16)],
)
def test_rotary_embeddings_are_those_of_transformers(
    num_heads: int, num_kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """To the last bit: every step rounds alike. The halves of cos and sin differ, as no model's do. What is
    also written, as numbers or in 8 bits, are rotated keys, and values; and nothing else is."""
    queries, keys = (
        random(3, heads, width, dtype=dtype, device=device, seed=heads) for heads in (num_heads, num_kv_heads)
    )
    cos, sin = (random(3, width, dtype=dtype, device=device, seed=seed) for seed in (8, 9))
    plain = apply_rotary_pos_emb(
        queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], cos[None], sin[None]
    )
    # As models hand them over, queries may lie head after head.
    by_head = queries.transpose(0, 1).contiguous().transpose(0, 1)
    for mine in (queries, by_head):
        for found, plainly in zip(rotary(mine, keys, cos, sin), plain, strict=True):
            assert found.is_contiguous()
            assert torch.equal(found, plainly[0].transpose(0, 1))
    # From the smallest numbers to the largest, and zeros.
    values = random(3, 2 * num_kv_heads, width, dtype=FLOAT32, device=device, seed=7)[:, num_kv_heads:]
    values = (values * torch.exp(4 * values)).clamp(-6e4, 6e4).to(dtype)
    values[0, 0] = 0
    rotated, index_T = plain[1][0].transpose(0, 1), torch.tensor([31, 0, 8], device=device)
    for kind in (dtype, torch.float8_e4m3fn):
        pages = torch.full((3, 2, 4, 8 * num_kv_heads * width), 5, dtype=kind, device=device)
        scales = torch.full((3, 2, 4, 8 * num_kv_heads), 5, dtype=BFLOAT16, device=device)
        numbers = pages if kind is dtype else pages.view(torch.uint8)
        own = scales[:, : 2 * (kind is not dtype)]
        found = write_rotated(*numbers[0], index_T, keys, values, queries, cos, sin, *own[0])
        assert torch.equal(found[1], rotated) and torch.equal(found[0], plain[0][0].transpose(0, 1))
        write_tokens(*numbers[1], index_T, rotated, values, *own[1])
        plain_write(*numbers[2], index_T, rotated, values, *own[2])
        for each in (pages.float(), scales):
            assert torch.equal(each[0], each[2]) and torch.equal(each[1], each[2]), kind


@pytest.mark.parametrize(
    ("shape", "is_tanh", "dtype"),
    [
        ((1, 3, 100), False, BFLOAT16), ((3, 1000), True, BFLOAT16), ((1, 3, 100), True, FLOAT32),
        ((1, 1), False, FLOAT16),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gated_activations_are_the_plain_ones(
    shape: tuple[int, ...], is_tanh: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Also where the exponential overflows."""
    gates, ups = (4 * random(*shape, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    gates.view(-1)[-1], gates.view(-1)[0] = -200.0, 300.0

    def gated(gates: Tensor, ups: Tensor) -> Tensor:
        return (F.gelu(gates, approximate="tanh") if is_tanh else F.silu(gates)) * ups

    found = gated_activation(gates, ups, is_tanh=is_tanh)
    check(found, gated(gates.double(), ups.double()), gated(gates, ups))
    joined = torch.cat([gates, ups, ups], -1)
    strided = (joined[..., : shape[-1]], joined[..., -shape[-1] :])
    assert torch.equal(gated_activation(*strided, is_tanh=is_tanh), found)
    gates.view(-1)[0] = torch.nan
    found = gated_activation(gates, ups, is_tanh=is_tanh)
    assert found.isnan().sum() == 1 and found.view(-1)[0].isnan(), "it is not hidden, and spoils no other"


def test_nothing_is_not_launched(device: torch.device) -> None:
    empty = torch.empty(0, 2, 16, device=device)
    pages = torch.ones(2, 2, 64, device=device)
    write_tokens(*pages, torch.empty(0, dtype=torch.int64, device=device), empty, empty)
    assert (pages == 1).all()
    assert rotary(empty, empty, empty[:, 0], empty[:, 0])[1].shape == empty.shape
    assert gated_activation(empty, empty, is_tanh=True).shape == empty.shape
    weight = torch.ones(16, device=device)
    normed = rms_norm(empty, weight, epsilon=EPSILON, weight_offset=0.0, rounds_first=True)
    assert normed.shape == empty.shape
