"""The faster float32 product gives the same results, and is used only on request."""

import copy

import pytest
import torch
from torch import nn

from specdist.models.cpu.linear import MIN_WEIGHTS, OneDnnLinears


@pytest.mark.parametrize(("num_tokens", "bias"), [(1, False), (7, True), (300, False)])
def test_same_product_inside_and_outside(num_tokens: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = nn.Sequential(nn.Linear(512, MIN_WEIGHTS // 512, bias=bias), nn.Linear(512, 8, bias=bias))
    switched = copy.deepcopy(plain)
    linears = OneDnnLinears(switched)
    x = torch.randn(1, num_tokens, 512, generator=generator)
    with torch.inference_mode():
        expected = plain(x)
        assert torch.equal(switched(x), expected)
        with linears.active():
            found = switched(x)
    # Sums of 512 products of order 1, in another order.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
