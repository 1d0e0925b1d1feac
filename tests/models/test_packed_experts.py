"""Packed experts give what the numbers give that they mean: in every format and layout, whole and cut, one
expert after the other (the kernel of all: `tests.kernels.test_experts`)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import fill_quantized, packed_experts_of, place_experts
from specdist.models.recurrent.cuts import cut_of
from specdist.models.sharding.experts import cut_experts
from tests.models.stored_experts import FORMATS, Stored, float8, generator
from tests.models.test_experts import HIDDEN, NUM_CHOSEN, NUM_EXPERTS, NUM_TOKENS, WIDTH, experts_of

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Pair:
    """Experts of transformers in plain numbers, and the matrices that make their parameters: by parameter the
    places in it."""

    plain: Any
    stored: dict[str, list[tuple[Piece, Stored]]]


def pair_of(layout: str, kind: str) -> Pair:
    """Of experts that are joined in the files with gpt-oss's layout, and stored one by one with others."""
    generator.manual_seed(3)
    plain = experts_of(layout)
    up = "gate_up_proj" if plain.has_gate else "up_proj"
    stored: dict[str, list[tuple[Piece, Stored]]] = {}
    for leaf in (up, "down_proj"):
        parameter, places = plain.get_parameter(leaf), []
        is_split = leaf == "gate_up_proj" and plain.is_concatenated
        num_outputs, num_inputs = (HIDDEN, WIDTH) if leaf == "down_proj" else (WIDTH, HIDDEN)
        num_outputs *= 2 if leaf == "gate_up_proj" and not is_split else 1
        for expert in range(NUM_EXPERTS):
            for half in range(2 if is_split else 1):
                each = FORMATS[kind](num_outputs, num_inputs)
                begin, shape = (expert, half * num_outputs, 0), (1, num_outputs, num_inputs)
                numbers, steps = each.plain, [("unsqueeze", (0,))]
                if plain.is_transposed:
                    begin, shape = (expert, 0, begin[1]), (1, num_inputs, num_outputs)
                    numbers, steps = numbers.T, [("transpose", (0, 1)), *steps]
                part = parameter.data[expert, begin[1] :, begin[2] :]
                part[: shape[1], : shape[2]] = numbers
                places.append((Piece(f"{leaf} {expert} {half}", begin, shape, tuple(steps)), each))
        stored[leaf] = places
    return Pair(plain, stored)


def packed_of(
    pair: Pair,
    rank: int,
    num_ranks: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    *,
    are_whole: bool = False,
) -> Any:
    """What a rank has of the pair's experts, packed; biases in plain numbers."""
    monkeypatch.setattr(dist, "get_rank", lambda _: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda _: num_ranks)
    holder = nn.ModuleDict({"experts": copy.deepcopy(pair.plain).to("meta")})
    if num_ranks > 1:
        cut_experts(holder, None, is_expert_parallel=are_whole)  # type: ignore[arg-type]
    places = {
        f"experts.{leaf}": [(piece.source, piece) for piece, _ in found]
        for leaf, found in pair.stored.items()
    }
    formats = {piece.source: each.weight.form for found in pair.stored.values() for piece, each in found}
    place_experts(holder, "it", formats, places, torch.float32)
    holder = holder.to_empty(device="cpu")
    for name, experts in packed_experts_of(holder):
        for piece, each in pair.stored[name.removeprefix("experts.")]:
            fill_quantized(experts, piece, each.weight)
    module: Any = holder["experts"]
    for name, weight in module.named_parameters():
        whole = pair.plain.get_parameter(name)
        if (cut := cut_of(module, name)) is not None:
            chosen = torch.tensor([place for own in cut.ranges for place in own], dtype=torch.int64)
            whole = whole.index_select(cut.dim, chosen) if len(chosen) else torch.zeros_like(whole)
        weight.data = whole.data.to(dtype)
    return module


def tokens(dtype: torch.dtype, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator.manual_seed(4)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    scores, chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_CHOSEN)
    return hidden, chosen, scores.to(dtype)


LAYOUTS = ["halves after each other", "turned, halves in turns, with biases", "turned", "without a gate"]


# Every format and every layout, with others each.
@pytest.mark.parametrize(
    ("layout", "kind"),
    [(LAYOUTS[(place + shift) % 4], kind) for shift in (0, 2) for place, kind in enumerate(FORMATS)],
)
def test_packed_experts_give_what_their_numbers_give(
    layout: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and as the sum of two and of three ranks, between whose parts blocks and groups are divided."""
    pair = pair_of(layout, kind)
    for dtype, tolerance in TOLERANCES.items():
        arguments = tokens(dtype)
        expected = copy.deepcopy(pair.plain).to(dtype)(*arguments).float()
        for num_ranks in (1, 2, 3) if dtype == torch.float32 else (1,):
            parts = [packed_of(pair, rank, num_ranks, dtype, monkeypatch) for rank in range(num_ranks)]
            found = sum(part(*arguments).float() for part in parts)
            error = (found - expected).norm() / expected.norm()
            assert error < tolerance, (num_ranks, dtype, float(error))


def test_what_cannot_stay_packed_is_dequantised_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cut between two numbers of a byte, experts of which some are stored in another way, and groups that
    the kernel cannot tell apart by bits: nothing else notices if they stay packed."""
    monkeypatch.setitem(FORMATS, "FP8, groups of 12", lambda *shape: float8(*shape, 1, 12))
    odd = pair_of("without a gate", "FP8, groups of 12")
    mixed, pair = pair_of("halves after each other", "FP8, channels"), pair_of("turned", "MXFP4")
    mixed.stored["down_proj"][1] = (mixed.stored["down_proj"][1][0], FORMATS["FP8, blocks"](HIDDEN, WIDTH))
    for each, num_ranks, words in (
        (pair, 8, "a rank has 3 columns, and two share a byte"),
        (mixed, 1, "not all of a layer are quantised in one way"),
        (odd, 1, "groups of 12 columns, which is not a power of two"),
    ):
        assert not list(packed_experts_of(packed_of(each, 0, num_ranks, torch.float32, monkeypatch)))
        assert f"are dequantised ({words})" in caplog.messages[-1]


@pytest.mark.parametrize("layout", ["halves after each other", "turned, halves in turns, with biases"])
def test_ranks_may_have_whole_packed_experts(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three ranks one has two; pairs of a token and another rank's expert give nothing."""
    pair, arguments = pair_of(layout, "MXFP4"), tokens(torch.float32)
    parts = [packed_of(pair, rank, 3, torch.float32, monkeypatch, are_whole=True) for rank in range(3)]
    assert [dict(packed_experts_of(part))["down_proj"].num_experts for part in parts] == [1, 1, 2]
    expected = pair.plain(*arguments)
    found = sum(part(*arguments) for part in parts)
    assert (found - expected).norm() < TOLERANCES[torch.float32] * expected.norm()
