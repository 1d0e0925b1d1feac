"""The products of packed experts in one launch: of numbers that the test has made plain itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import PackedExperts, ends_of, fill_quantized
from tests.models.stored_experts import FORMATS, Stored, generator

NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS = 5, 80, 144
# Of float32 sums, and of one rounding to bfloat16 of each number, and of the result.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def experts_of(kind: str, device: torch.device) -> tuple[PackedExperts, list[Stored]]:
    """Neither their outputs nor their inputs fill a whole number of tiles."""
    generator.manual_seed(5)
    stored = [FORMATS[kind](NUM_OUTPUTS, NUM_INPUTS) for _ in range(NUM_EXPERTS)]
    form = stored[0].weight.form.within(NUM_OUTPUTS, NUM_INPUTS)
    packed = PackedExperts(form, (NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS), None, is_transposed=False)
    packed = packed.to_empty(device=device)
    for index, each in enumerate(stored):
        fill_quantized(packed, Piece("", (index, 0, 0), (1, NUM_OUTPUTS, NUM_INPUTS)), each.weight)
    return packed, stored


def expected(inputs: Tensor, ids: list[int], stored: list[Stored]) -> Tensor:
    """In float64, of numbers that are rounded to the inputs' dtype."""
    rows = [
        stored[index].plain.to(inputs.dtype).double() @ row.cpu().double()
        if index < NUM_EXPERTS
        else torch.zeros(NUM_OUTPUTS).double()
        for index, row in zip(ids, inputs, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, list(TOLERANCES)[place % 2]) for place, kind in enumerate(FORMATS)],
    ids=str,
)
def test_experts_products_are_those_of_their_plain_numbers(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Of experts with several blocks of tokens, with one token and without any, and of tokens whose expert is
    elsewhere; few and many. A token has the same numbers alone."""
    packed, stored = experts_of(kind, device)
    for num_first in (17, 320) if kind == list(FORMATS)[1] else (17,):
        ids = [0] * num_first + [1] + [3] * 16 + [4] + [NUM_EXPERTS] * 3
        inputs = torch.randn(len(ids), NUM_INPUTS, generator=generator).to(device, dtype)
        found = packed.kernel_product(inputs, ends_of(torch.tensor(ids, device=device), NUM_EXPERTS))
        assert found.dtype == dtype
        exact = expected(inputs, ids, stored)
        assert ((found.cpu().double() - exact).norm(dim=1) <= TOLERANCES[dtype] * exact.norm(dim=1)).all()
        assert not found[len(ids) - 3 :].any()
        one = slice(num_first, num_first + 1)
        alone = ends_of(torch.tensor(ids[one], device=device), NUM_EXPERTS)
        assert torch.equal(packed.kernel_product(inputs[one], alone), found[one])
