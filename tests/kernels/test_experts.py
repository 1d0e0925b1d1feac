"""The products of packed experts in one launch: of numbers that the test has made plain itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels import experts
from specdist.kernels.experts import route, sum_pairs
from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import (
    PackedExperts,
    ends_of,
    fill_quantized,
    plain_sum,
    sorting_on,
)
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


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "width"),
    [(1, 128, 8, 40), (7, 5, 4, 1100), (70, 300, 6, 3), (512, 60, 2, 20)],
)
def test_pairs_are_sorted_by_expert_and_summed_by_token(
    num_tokens: int, num_experts: int, num_chosen: int, width: int, device: torch.device
) -> None:
    """Sizes fill no tile; some experts are elsewhere. NaN stays in its token; one alone has the same bits."""
    generator.manual_seed(4)
    some_TC = torch.randint(num_experts + 1, (num_tokens, num_chosen), generator=generator).to(device)
    some_TC[-1, 0] = 0
    for ids_TC, dtype in ((some_TC, torch.bfloat16), (0 * some_TC + num_experts - 1, torch.float32)):
        hidden = torch.randn(num_tokens, width, generator=generator).to(device, dtype)
        found, expected = (each.sort_pairs(hidden, ids_TC, num_experts) for each in (experts, plain))
        assert all(map(torch.equal, found, expected)) and found[1].dtype == torch.int32
        rows = torch.randn(ids_TC.numel(), width, generator=generator).to(device, dtype)
        rows[int(found[1][-1]) :] = torch.nan
        few_TC, places = ids_TC[-7:], found[2][-7 * num_chosen :]
        weights_TC = torch.rand(few_TC.shape, generator=generator).to(device)
        biases = torch.randn(num_experts, width, generator=generator).to(device, dtype)
        for weights, added in ((weights_TC, None), (weights_TC.to(dtype), biases)):
            sums = sum_pairs(rows, places, few_TC, weights, added, num_experts)
            exact = plain.sum_pairs(rows.double(), places, few_TC, weights, added, num_experts)
            limit = 2 * num_chosen * torch.finfo(dtype).eps
            assert sums.dtype == dtype and torch.allclose(sums.double(), exact, rtol=0.0, atol=limit)
            last = places[-num_chosen:], few_TC[-1:], weights[-1:]
            assert torch.equal(sum_pairs(rows, *last, added, num_experts)[0], sums[-1])
            spoilt = rows.index_fill(0, places[-num_chosen], torch.nan)
            again = sum_pairs(spoilt, places, few_TC, weights, added, num_experts)
            assert again[-1].isnan().all() and torch.equal(again[:-1], sums[:-1])


@pytest.mark.parametrize("name", ["sort_pairs", "sum_pairs"])
def test_wrong_sorting_is_not_used(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else compares it on a device: experts would be given other tokens, or weights."""
    right: Any = getattr(experts, name)
    assert sorting_on.__wrapped__(device, torch.float32)[1] is sum_pairs
    monkeypatch.setattr(experts, name, lambda first, *others: right(first.flip(0), *others))
    assert sorting_on.__wrapped__(device, torch.float32)[1] is plain_sum
