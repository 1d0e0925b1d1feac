"""The products of packed experts in one launch: of numbers that the test has made plain itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels import experts as kernel
from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import Groups, PackedExperts, fill_quantized
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
    """Of experts with many tokens, with one and without any, and of tokens whose expert is elsewhere. A token
    has the same numbers alone."""
    packed, stored = experts_of(kind, device)
    ids = [0] * 17 + [1] + [3] * 2 + [4] + [NUM_EXPERTS] * 3
    inputs = torch.randn(len(ids), NUM_INPUTS, generator=generator).to(device, dtype)
    found = packed.kernel_product(inputs, Groups(torch.tensor(ids, device=device), NUM_EXPERTS, dtype))
    assert found.dtype == dtype
    exact = expected(inputs, ids, stored)
    assert (found.cpu().double() - exact).norm() <= TOLERANCES[dtype] * exact.norm()
    assert not found[len(ids) - 3 :].any()
    alone = Groups(torch.tensor(ids[18:19], device=device), NUM_EXPERTS, dtype)
    assert torch.equal(packed.kernel_product(inputs[18:19], alone), found[18:19])


@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [(7, torch.float32), (400, torch.float32), (400, torch.bfloat16)], ids=str
)
def test_blocks_have_every_token_once(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Their number depends on that of tokens alone; what is left over is empty."""
    lengths = set()
    for seed in range(20):
        generator.manual_seed(seed)
        favourites = torch.randn(NUM_EXPERTS + 1, generator=generator).mul(2).softmax(0)
        ids = favourites.multinomial(num_tokens, True, generator=generator).sort().values
        groups = Groups(ids.to(device), NUM_EXPERTS, dtype)
        blocks, size = groups.blocks
        lengths.add((blocks.shape[1], size))
        found = [
            (index, token)
            for index, begin, end in blocks.T.tolist()
            for token in range(begin, min(end, begin + size))
        ]
        assert found == [(index, token) for token, index in enumerate(ids.tolist()) if index < NUM_EXPERTS]
    are_many = num_tokens == 400 and dtype == torch.bfloat16
    assert len(lengths) == 1 and size == (kernel.MANY_TOKENS if are_many else kernel.FEW_TOKENS)
