"""Attention over pages: equal to float64, finite where it is padded, independent of what else is in the
batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels import paged_attention
from specdist.kernels.paged_attention import Tile
from specdist.models.attention.attention import AttentionCall, AttentionKind, AttentionRules
from specdist.models.attention.kernel import SdpaKernel, TritonKernel
from specdist.models.attention.probe import plain_attention
from specdist.models.batch.flat import PagedSegments, Segments
from specdist.models.passes.static import choose_bucket

# Of the largest difference from float64, for values of order 1: rounding of the weights and of the output.
# Of float32, sums in an order that depends on the processor: 7.4e-6 was seen for keys of 320 numbers.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2.5e-2}
# The interpreter is slow: the tests' splits are short.
SPLIT_KEYS = 64
# (queries, keys) of every segment: single steps, verification blocks, prompt chunks, all in one launch; one
# key, just a split, and keys on both sides of several splits.
MIXED = ((1, 1), (6, 101), (1, SPLIT_KEYS), (5, 2 * SPLIT_KEYS + 3), (17, 17))
GLOBAL, LOCAL, CAPPED, SINKS = (
    AttentionRules(None, None, None),
    AttentionRules(0.3, 40, None),
    AttentionRules(None, 90, 3.0),
    AttentionRules(None, 90, None, has_sinks=True),
)
FIRST_HIDDEN, NO_MASK = (
    AttentionRules(None, None, None, hides_first=first, is_causal=first) for first in (True, False)
)


class Case(NamedTuple):
    """A pass over random pages; what no segment owns is NaN."""

    queries_THD: Tensor
    key_pages: Tensor
    value_pages: Tensor
    segments: PagedSegments
    sinks_H: Tensor | None

    def only(self, index: int) -> Case:
        """The same segment alone."""
        begin, end = self.segments.query_starts_S1[index : index + 2].tolist()
        table_SP, used_S = (
            self.segments.block_table_SP[index : index + 1],
            self.segments.used_S[index : index + 1],
        )
        alone = make_segments(table_SP, used_S, [end - begin], int(used_S[0]))
        return self._replace(queries_THD=self.queries_THD[begin:end], segments=alone)


def make_segments(
    table_SP: Tensor, used_S: Tensor, num_queries: Sequence[int], num_keys: int
) -> PagedSegments:
    starts = torch.tensor(np.append(0, np.cumsum(num_queries)), dtype=torch.int32, device=used_S.device)
    return PagedSegments(table_SP, used_S, starts, max(num_queries), num_keys)


def make_case(
    lengths: Sequence[tuple[int, int]],
    kind: AttentionKind,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
) -> Case:
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    num_queries, used = (list(numbers) for numbers in zip(*lengths, strict=True))
    num_pages = -(-max(used) // page_size)
    # Page 0 belongs to no segment.
    table_SP = 1 + rng.permutation(num_pages * len(used)).reshape(len(used), num_pages)
    shape = (1 + table_SP.size, page_size, kind.num_kv_heads, kind.width)
    pages = torch.randn(2, *shape, generator=generator)
    pages[:, 0] = torch.nan
    for segment, num_keys in enumerate(used):
        places = torch.arange(num_pages * page_size).view(num_pages, page_size)
        pages[:, table_SP[segment]] = torch.where(
            (places < num_keys)[:, :, None, None], pages[:, table_SP[segment]], torch.nan
        )
    key_pages, value_pages = pages.to(device, dtype)
    if kind.value_width is not None:
        # As the cache lays them out: a view of the keys, or pages of their own.
        of_values = (key_pages if kind.rules.is_latent else value_pages)[..., : kind.value_width]
        value_pages = of_values if kind.rules.is_latent else of_values.contiguous()
    queries = torch.randn(sum(num_queries), kind.num_heads, kind.width, generator=generator).to(device, dtype)
    segments = make_segments(
        torch.tensor(table_SP, dtype=torch.int32, device=device),
        torch.tensor(used, dtype=torch.int32, device=device),
        num_queries,
        max(used),
    )
    # Of the weight of some keys to that of all.
    sinks_H = torch.linspace(5.0, 0.0, kind.num_heads).to(device, dtype) if kind.rules.has_sinks else None
    return Case(queries, key_pages, value_pages, segments, sinks_H)


def expected_output(case: Case, rules: AttentionRules) -> Tensor:
    """Attention in float64, segment by segment, as its definition says; zeros where a query sees no key."""
    outputs = []
    starts = case.segments.query_starts_S1.tolist()
    num_repeats = case.queries_THD.shape[1] // case.key_pages.shape[2]
    for index, num_keys in enumerate(case.segments.used_S.tolist()):
        queries_HQD = case.queries_THD[starts[index] : starts[index + 1]].double().transpose(0, 1)
        keys_HLD, values_HLD = (
            pages[case.segments.block_table_SP[index].long()]
            .flatten(0, 1)[:num_keys]
            .double()
            .repeat_interleave(num_repeats, dim=1)
            .transpose(0, 1)
            for pages in (case.key_pages, case.value_pages)
        )
        scale = queries_HQD.shape[2] ** -0.5 if rules.scale is None else rules.scale
        scores_HQL = scale * queries_HQD @ keys_HLD.transpose(1, 2)
        if rules.softcap is not None:
            scores_HQL = rules.softcap * torch.tanh(scores_HQL / rules.softcap)
        positions_Q = num_keys - queries_HQD.shape[1] + torch.arange(queries_HQD.shape[1])
        ages_QL = (positions_Q[:, None] - torch.arange(num_keys)).to(scores_HQL.device)
        is_hidden = ((ages_QL < 0) & rules.is_causal) | (ages_QL >= (rules.window or num_keys + 1))
        if rules.hides_first:
            is_hidden[positions_Q > 0, 0] = True
        scores_HQL = scores_HQL.masked_fill(is_hidden, -torch.inf)
        if case.sinks_H is not None:
            sinks_HQ1 = case.sinks_H.double()[:, None, None].expand(-1, scores_HQL.shape[1], 1)
            scores_HQL = torch.cat([scores_HQL, sinks_HQ1], dim=-1)
        weights = F.softmax(scores_HQL, dim=-1).nan_to_num(0.0)[..., :num_keys]
        outputs.append((weights @ values_HLD).transpose(0, 1))
    return torch.cat(outputs)


def attended(case: Case, rules: AttentionRules) -> Tensor:
    *tensors, segments, sinks_H = case
    return TritonKernel().attend(AttentionCall(*tensors, rules, sinks_H), segments)


def check(case: Case, rules: AttentionRules) -> None:
    found = attended(case, rules)
    error = (found.double() - expected_output(case, rules)).abs().max().item()
    # A NaN is an error as well.
    assert error <= TOLERANCES[found.dtype], error


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "SPLIT_KEYS", SPLIT_KEYS)


def use_splits(monkeypatch: pytest.MonkeyPatch, in_splits: bool) -> None:
    """Splits of a segment's keys are programs of their own, or parts of one."""
    monkeypatch.setattr(paged_attention, "MIN_PROGRAMS", 10**9 if in_splits else 0)


# All rules, both kinds of splits, and one head for each, a few, or all of them; in half precision every
# width; and keys that are wider than values, or are the values, too, with heads of two programs and of one.
FEW = ((1, 100), (5, 44), (20, 20))
CASES = {
    "global": (MIXED, AttentionKind(6, 2, 64, GLOBAL), torch.float32, True),
    "local": (MIXED, AttentionKind(8, 1, 64, LOCAL), torch.float32, True),
    "local, one program": (MIXED, AttentionKind(2, 2, 64, LOCAL), torch.float32, False),
    "capped": (MIXED, AttentionKind(3, 1, 64, CAPPED), torch.float32, False),
    "sinks": (MIXED, AttentionKind(3, 1, 64, SINKS), torch.float32, True),
    "first hidden": (MIXED, AttentionKind(3, 1, 64, FIRST_HIDDEN), torch.float32, True),
    "no mask": (MIXED, AttentionKind(3, 1, 64, NO_MASK), torch.float32, False),
    "80": (FEW, AttentionKind(4, 2, 80, GLOBAL), torch.bfloat16, True),
    "256": (FEW, AttentionKind(4, 2, 256, GLOBAL), torch.bfloat16, False),
    "128": (FEW, AttentionKind(4, 2, 128, GLOBAL), torch.float16, True),
    "wider": (FEW, AttentionKind(6, 2, 96, LOCAL, 64), torch.float32, True),
    "latent": (FEW, AttentionKind(20, 1, 320, LOCAL._replace(is_latent=True), 288), torch.bfloat16, True),
    "narrow latent": (FEW, AttentionKind(3, 1, 24, LOCAL._replace(is_latent=True), 20), torch.float32, False),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_float64(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters' rules in every implementation; a segment of one token at its first position among them."""
    lengths, kind, dtype, in_splits = CASES[name]
    use_splits(monkeypatch, in_splits)
    case = make_case(lengths, kind, dtype=dtype, device=device)
    check(case, kind.rules)
    if kind.rules in (FIRST_HIDDEN, NO_MASK):
        *tensors, segments, sinks_H = case
        call = AttentionCall(*(tensor.nan_to_num(0.0) for tensor in tensors), kind.rules, sinks_H)
        for attend in (SdpaKernel().attend, plain_attention):
            error = (attend(call, segments).double() - expected_output(case, kind.rules)).abs().max()
            assert error <= 5e-6


def test_values_that_are_wider_than_keys_are_refused(device: torch.device) -> None:
    kind = AttentionKind(4, 2, 32, GLOBAL, 48)
    case = make_case(((1, 20),), kind, device=device)
    case = case._replace(value_pages=case.value_pages.repeat(1, 1, 1, 2)[..., :48])
    with pytest.raises(ValueError, match="values of 48 are wider than keys of 32"):
        attended(case, GLOBAL)


def test_a_query_of_a_strided_projection_and_pages_of_another_size(device: torch.device) -> None:
    """Queries, as models hand them over, are a transposed view."""
    case = make_case(((1, 30), (7, 301)), AttentionKind(4, 2, 64, GLOBAL), page_size=256, device=device)
    strided = case.queries_THD.transpose(0, 1).contiguous().transpose(0, 1)
    check(case._replace(queries_THD=strided), GLOBAL)


@pytest.mark.parametrize(("rules", "in_splits"), [(GLOBAL, False), (SINKS, True)], ids=["global", "sinks"])
def test_padding_gets_zeros(
    rules: AttentionRules, in_splits: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment without queries, one of queries without keys, and one with more queries than keys."""
    use_splits(monkeypatch, in_splits)
    case = make_case(((3, 150), (1, 2), (1, 1)), AttentionKind(4, 2, 64, rules), device=device)
    queries = torch.cat([case.queries_THD[:3], torch.full((6, 4, 64), torch.nan, device=device)])
    used_S = torch.tensor([150, 2, 0], dtype=torch.int32, device=device)
    for num_queries in ((3, 0, 6), (3, 4, 2)):
        segments = make_segments(case.segments.block_table_SP, used_S, num_queries, 150)
        found = attended(case._replace(queries_THD=queries.nan_to_num(1.0), segments=segments), rules)
        without_keys = found[sum(num_queries[:2]) :]
        assert torch.equal(without_keys, torch.zeros_like(without_keys))
        assert found[:3].isfinite().all()
        if num_queries[1]:
            assert not found[3:5].any(), "positions before the first key"


def test_a_row_does_not_depend_on_its_neighbours(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit: alone or in a batch, its splits as programs of their own or not."""
    case = make_case(MIXED, AttentionKind(2, 1, 64, SINKS), dtype=torch.bfloat16, device=device)
    outputs = []
    for in_splits in (False, True):
        use_splits(monkeypatch, in_splits)
        outputs.append(attended(case, SINKS))
        starts = case.segments.query_starts_S1.tolist()
        for index in range(len(MIXED)):
            alone = attended(case.only(index), SINKS)
            assert torch.equal(alone, outputs[-1][starts[index] : starts[index + 1]]), MIXED[index]
    assert torch.equal(*outputs)


def test_heads_that_share_keys_share_a_tile() -> None:
    """In a recorded pass, too, a verification block of five tokens reads its keys and values once, also with
    eight heads per group, and single tokens have no more rows than they need."""
    lengths_S = np.ones(32, np.int64)
    for num_new, num_repeats, num_rows in ((1, 1, 16), (1, 4, 16), (1, 8, 16), (5, 4, 32), (5, 8, 64)):
        segments = Segments(num_new * lengths_S.cumsum() - num_new, num_new * lengths_S, 99 * lengths_S)
        bucket = choose_bucket(segments, 32, page_size=16, table_width=64)
        assert bucket is not None
        assert Tile.of(128, num_repeats, torch.bfloat16, bucket.num_queries).num_rows == num_rows
    for dtype in TOLERANCES:
        assert Tile.of(128, 71, dtype, num_queries=1).num_rows == 128, "as many rows as heads at least"


@pytest.mark.parametrize("width", [64, 96, 128])
def test_steps_have_as_many_keys_in_every_tile(width: int) -> None:
    """A token's softmax goes through the same steps whether it is decoded, verified or part of a prompt."""
    tiles = [Tile.of(width, 4, torch.bfloat16, num_queries) for num_queries in (1, 5, 512)]
    assert len({tile.num_keys for tile in tiles}) == 1
    assert tiles[0].num_rows <= tiles[1].num_rows <= tiles[2].num_rows
