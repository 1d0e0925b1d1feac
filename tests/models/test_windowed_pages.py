"""Passes over windowed layers that have pages of their own, which are NaN before they are written and once
they are given back: the logits of plain forwards, with every attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdist.models.attention.attention import AttentionCall, AttentionRules, PagedAttention
from specdist.models.attention.probe import plain_attention
from specdist.models.batch.flat import FlatBatch, plan_attention, ragged_segments
from specdist.models.cache.key_value import KeyValueCache, LayerShape
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.static import StaticPasses
from tests.engine.harness import paged_runner
from tests.models.chunks import MIXED, STEPS, check_rows
from tests.models.families import tiny_model
from tests.models.kernels import PlainKernel
from tests.models.test_compiled import needs_compiler
from tests.models.test_static import SHORT

WAYS = {
    "ragged": Acceleration(),
    "static": Acceleration(is_static=True),
    "kernel": Acceleration(kernels=[PlainKernel()]),
    "static with a kernel": Acceleration(is_static=True, kernels=[PlainKernel()]),
}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("mistral", "ragged"), ("gpt_neo", "ragged"), ("gemma2", "static"), ("gemma2", "kernel"),
        ("gpt_neo", "static with a kernel"), ("mistral", "static with a kernel"),
    ],
)  # fmt: skip
def test_logits_are_those_of_plain_forwards(family: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows in all layers, in every other one with a soft cap, and through an adapter."""
    monkeypatch.setattr("specdist.models.passes.static.MIN_KEYS", 8)
    monkeypatch.setattr("specdist.models.passes.static.KEYS_FACTOR", 2)
    ran, compute = [], StaticPasses.compute

    def noted(self: StaticPasses, bucket: object) -> object:
        ran.append(bucket)
        return compute(self, bucket)  # type: ignore[arg-type]

    monkeypatch.setattr(StaticPasses, "compute", noted)
    plain = tiny_model(family)
    for schedule in (SHORT, MIXED):
        check_rows(plain, paged_runner(plain, WAYS[way]), schedule, is_windowed=True)
    assert bool(ran) is WAYS[way].is_static


@needs_compiler
def test_compiled_layers_read_their_own_pages() -> None:
    plain = tiny_model("mistral")
    runner = paged_runner(plain)
    assert runner.compiled is not None
    for schedule in (STEPS, SHORT, MIXED):
        check_rows(plain, runner, schedule, is_windowed=True)


def test_a_host_reads_no_pages_before_a_window() -> None:
    """Of segments of other lengths in one call, each from its own first page on; the others are NaN."""
    page_size, window, num_rows, width = 4, 10, 3, 12
    generator = torch.Generator().manual_seed(0)
    table = np.random.default_rng(0).permutation(num_rows * width).reshape(num_rows, width)
    # New tokens and keys; the last row's window begins with its first page.
    lengths = np.array([[3, 47], [4, 30], [3, 12]])
    rows = np.repeat(np.arange(num_rows), lengths[:, 0])
    positions = np.concatenate([np.arange(keys - new, keys) for new, keys in lengths])
    batch = FlatBatch(np.zeros(len(rows), np.int64), rows, positions)
    cpu = torch.device("cpu")
    cache = KeyValueCache(
        {0: LayerShape(2, 8, 8)},
        num_pages=num_rows * width,
        page_size=page_size,
        dtype=torch.float32,
        device=cpu,
    )
    for pages in (cache.keys[0], cache.values[0]):
        pages.normal_(generator=generator)
    queries, keys, values = (torch.randn(len(rows), heads, 8, generator=generator) for heads in (4, 2, 2))
    call = AttentionCall(queries, keys, values, AttentionRules(None, window, None))
    plan = plan_attention(batch, table, page_size, cpu)
    assert len(plan.groups) == 1
    cache.write(0, plan.cache_index_T, keys, values)
    segments, _ = ragged_segments(batch, table, page_size, cpu)
    own_keys, own_values = cache.pages(0)
    expected = plain_attention(call._replace(keys=own_keys, values=own_values), segments)
    for row, (new, num_keys) in enumerate(lengths):
        unseen = table[row, : max(0, num_keys - new - window + 1) // page_size]
        for pages in (cache.keys[0], cache.values[0]):
            pages[torch.from_numpy(unseen)] = torch.nan
    torch.testing.assert_close(PagedAttention(cache, plan).attend(0, call), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", [None, PlainKernel()], ids=["by torch", "kernel"])
def test_a_hidden_first_token_is_the_sequence_s_and_not_the_window_s(kernel: PlainKernel | None) -> None:
    """A window that begins after it sees all of its own keys. In formulas, sequence by sequence."""
    page_size, window, cpu = 4, 6, torch.device("cpu")
    # The first window of the longer one begins with a page.
    lengths = np.array([[3, 28], [4, 5]])
    rows = np.repeat(np.arange(2), lengths[:, 0])
    positions = np.concatenate([np.arange(keys - new, keys) for new, keys in lengths])
    batch, table = FlatBatch(np.zeros(7, np.int64), rows, positions), np.arange(14).reshape(2, 7)
    cache = KeyValueCache(
        {0: LayerShape(1, 8, 8)}, num_pages=14, page_size=page_size, dtype=torch.float32, device=cpu
    )
    generator = torch.Generator().manual_seed(0)
    for pages in (cache.keys[0], cache.values[0]):
        pages.normal_(generator=generator)
    queries, keys, values = (torch.randn(7, 1, 8, generator=generator) for _ in range(3))
    call = AttentionCall(queries, keys, values, AttentionRules(None, window, None, hides_first=True))
    plan = plan_attention(batch, table, page_size, cpu)
    cache.write(0, plan.cache_index_T, keys, values)
    if kernel is None:
        found = PagedAttention(cache, plan).attend(0, call)
    else:
        segments, _ = ragged_segments(batch, table, page_size, cpu)
        own_keys, own_values = cache.pages(0)
        found = kernel.attend(call._replace(keys=own_keys, values=own_values), segments)
    own = [pages.view(2, 28, 8) for pages in (cache.keys[0], cache.values[0])]
    for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
        seen = slice(max(1, position - window + 1), position + 1)
        weights = (own[0][row, seen] @ queries[token, 0] / 8**0.5).softmax(dim=0)
        torch.testing.assert_close(found[token, 0], weights @ own[1][row, seen], atol=1e-5, rtol=1e-5)
