"""A cache in 8 bits: attention reads it as numbers of their token and head; what is written is checked with
rotary embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels import paged_attention, rotary
from specdist.models.attention.attention import AttentionCall, AttentionKind
from specdist.models.attention.kernel import SdpaKernel, TritonKernel
from specdist.models.cache.key_value import to_float8
from tests.kernels.test_paged_attention import (
    GLOBAL,
    LOCAL,
    SPLIT_KEYS,
    Case,
    expected_output,
    make_case,
)

# Several splits, a block, and queries that see no key.
LENGTHS = ((1, 70), (5, 44), (7, 7))
# Values of order 1 that are read as they are; a weight is rounded with its value's scale.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 2.5e-2, torch.bfloat16: 2.5e-2}


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "SPLIT_KEYS", SPLIT_KEYS)


def test_what_is_not_finite_is_not_hidden(device: torch.device) -> None:
    for wrong in (torch.inf, torch.nan):
        tokens = torch.ones(2, 1, 16, device=device)
        tokens[1, 0, 3] = wrong
        pages = torch.zeros(2, 2, 16, dtype=torch.uint8, device=device)
        scales = torch.zeros(2, 2, 1, dtype=torch.bfloat16, device=device)
        index_T = torch.arange(2, device=device)
        rotary.write_tokens(*pages, index_T, tokens, tokens, *scales)
        assert scales[:, 0].isfinite().all() and not scales[:, 1].isfinite().any()


def narrow(case: Case, kind: AttentionKind) -> tuple[Case, tuple[Tensor, Tensor], Case]:
    """The case in 8 bits, its scales, and what its pages mean. Sizes of tokens and heads differ, of keys in
    another way than of values."""
    (pages, tokens), heads = case.key_pages.shape[:2], torch.arange(kind.num_kv_heads)
    places = torch.arange(pages * tokens).view(pages, tokens, 1)
    found = []
    for factor, each in ((3, case.key_pages), (5, case.value_pages)):
        sizes = 0.125 * ((factor * places + heads) % 7 + 1)
        found.append(to_float8(each * sizes[..., None].to(each.device, each.dtype)))
    (keys, key_scales), (values, value_scales) = found
    if kind.rules.is_latent:
        values, value_scales = keys[..., : kind.value_width], key_scales
    meant = (
        bits.view(torch.float8_e4m3fn).double() * scales.double()[..., None]
        for bits, scales in ((keys, key_scales), (values, value_scales))
    )
    of_bits = case._replace(key_pages=keys, value_pages=values)
    return of_bits, (key_scales, value_scales), case._replace(**dict(zip(PAGES, meant, strict=True)))


PAGES = ("key_pages", "value_pages")


@pytest.mark.parametrize(
    ("kind", "dtype", "reads_bits"),
    [
        (AttentionKind(4, 2, 64, GLOBAL), torch.float32, False),
        (AttentionKind(6, 2, 40, LOCAL), torch.float16, True),
        (AttentionKind(2, 2, 24, GLOBAL, 16), torch.float32, True),
        (AttentionKind(3, 1, 24, LOCAL._replace(is_latent=True), 20), torch.bfloat16, False),
    ],
    ids=["global", "window", "wide-keys", "latents"],
)
def test_attention_equals_float64(
    kind: AttentionKind,
    dtype: torch.dtype,
    reads_bits: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits are read as on older GPUs, and the numbers as on those that have instructions for them."""
    if reads_bits or device.type == "cpu":
        read_dtype = torch.uint8 if reads_bits else torch.float8_e4m3fn
        monkeypatch.setattr(paged_attention, "readable", lambda pages: pages.view(read_dtype))
    case, scales, meant = narrow(make_case(LENGTHS, kind, dtype=dtype, device=device), kind)
    expected = expected_output(meant, kind.rules)
    *tensors, segments, sinks_H = case
    for kernel in (TritonKernel(), SdpaKernel()):
        found = kernel.attend(AttentionCall(*tensors, kind.rules, sinks_H, scales), segments)
        error = (found.double() - expected).abs().max().item()
        assert error <= TOLERANCES[dtype], (kernel.name, error)
