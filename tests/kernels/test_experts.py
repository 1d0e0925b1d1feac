"""The products of packed experts in one launch: of numbers that the test has made plain itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels.experts import route
from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import PackedExperts, ends_of, fill_quantized
from tests.kernels import plain
from tests.models.stored_experts import FORMATS, Stored, generator

NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS = 5, 80, 144
FORM = ("num_chosen", "is_sigmoid", "num_groups", "num_kept", "share", "rest")
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


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "is_sigmoid", "groups", "share"),
    [(60, 4, False, (1, 1), 0.0), (128, 8, False, (1, 1), 1.0), (256, 8, True, (8, 4), 0.4),
     (45, 3, False, (5, 3), 1.0)],
)  # fmt: skip
def test_a_routers_choice_is_that_of_float64(
    num_experts: int, num_chosen: int, is_sigmoid: bool, groups: tuple[int, int], share: float,
    device: torch.device,
) -> None:  # fmt: skip
    """Of experts and groups that fill no tile. NaN stays in its row; of equal scores the lowest id is chosen,
    from the largest score on; a token has the same numbers alone."""
    generator.manual_seed(3)
    logits_TE = 2 * torch.randn(7, num_experts, generator=generator).to(device)
    correction_E = 0.3 * torch.randn(num_experts, generator=generator).to(device)
    numbers = (num_chosen, is_sigmoid, *groups, share, float(not share))
    form: Any = dict(zip(FORM, numbers, strict=True))
    for correction in (None, correction_E):
        weights_TC, ids_TC = route(logits_TE, correction, dtype=torch.float32, **form)
        exact, exact_ids = plain.route(logits_TE.double(), correction, dtype=torch.float64, **form)
        assert torch.equal(ids_TC, exact_ids)
        assert torch.allclose(weights_TC.double(), exact, rtol=2e-6, atol=0)
        logits_TE[2, 1] = torch.nan
        weights, ids = route(logits_TE[2:4], correction, dtype=torch.bfloat16, **form)
        assert weights[0].isnan().any() and len(ids[0].unique()) == num_chosen and ids[0].max() < num_experts
        assert torch.equal(weights[1], weights_TC[3].bfloat16()) and torch.equal(ids[1], ids_TC[3])
        logits_TE[2, 1] = 0.5
    zeros_TE = torch.tensor([0.0, -0.0], device=device).repeat(1, num_experts)[:, :num_experts]
    assert route(zeros_TE, None, dtype=torch.float32, **form)[1].tolist() == [list(range(num_chosen))]
