"""What the flat forward over the paged cache costs beside transformers' own forward over a ``DynamicCache``.

Both run the same new tokens behind the same context, on the target: decoding steps and verification blocks.
All rows are equally long, so transformers pads nothing.

B rows, C context tokens, N new tokens per row.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from specdist.benchmark.paged import PagedPair
from specdist.engine.device_clock import timed
from specdist.models.flat import FlatBatch, arange_segments
from specdist.models.runner import ModelRunner

OVERHEAD_BATCH_SIZES = (1, 8)
NUM_WARMUPS = 2


@dataclass(frozen=True, kw_only=True)
class OverheadResult:
    """Medians in seconds of one kind of pass; ``ratio`` is specdist's over transformers'."""

    batch_size: int
    num_new_tokens: int
    num_context_tokens: int
    specdist_s: float
    transformers_s: float
    ratio: float
    num_passes: int


def measure_overhead(
    paged: PagedPair, *, num_context_tokens: int, num_draft_tokens: int, num_passes: int, seed: int
) -> list[OverheadResult]:
    """One result per batch size for a decoding step and for a block of ``num_draft_tokens`` + 1 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        _measure_case(
            paged,
            torch.randint(paged.pair.vocab_size, (batch_size, num_context_tokens), generator=generator),
            torch.randint(paged.pair.vocab_size, (batch_size, num_new_tokens), generator=generator),
            num_passes,
        )
        for batch_size in OVERHEAD_BATCH_SIZES
        for num_new_tokens in (1, num_draft_tokens + 1)
    ]


@torch.inference_mode()
def _measure_case(paged: PagedPair, context_BC: Tensor, new_BN: Tensor, num_passes: int) -> OverheadResult:
    ours, theirs = FlatPass(paged, paged.target, context_BC, new_BN), _PlainPass(paged, context_BC, new_BN)
    seconds = [(ours.seconds(), theirs.seconds()) for _ in range(NUM_WARMUPS + num_passes)]
    specdist_s, transformers_s = (
        statistics.median(column) for column in zip(*seconds[NUM_WARMUPS:], strict=True)
    )
    return OverheadResult(
        batch_size=len(new_BN),
        num_new_tokens=new_BN.shape[1],
        num_context_tokens=context_BC.shape[1],
        specdist_s=specdist_s,
        transformers_s=transformers_s,
        ratio=specdist_s / transformers_s,
        num_passes=num_passes,
    )


class FlatPass:
    """specdist's: the planning on the host is part of it. Repeating it overwrites the same cache entries."""

    def __init__(self, paged: PagedPair, runner: ModelRunner, context_BC: Tensor, new_BN: Tensor) -> None:
        self._pair = paged.pair
        self._runner = runner
        num_context_tokens, num_new_tokens = context_BC.shape[1], new_BN.shape[1]
        table = paged.new_page_table(len(new_BN))
        for slot in range(len(new_BN)):
            table.open(slot, context_BC[slot].tolist())
            table.extend(slot, num_context_tokens + num_new_tokens)
        runner.update_pages(table.drain_updates())
        self._pair.use_specdist_attention()
        runner.forward(_flat(context_BC, first=0), [])
        self._batch = _flat(new_BN, first=num_context_tokens)

    def run(self) -> Tensor:
        """Logits [B * N, V]."""
        return self._runner.forward(self._batch, np.arange(len(self._batch)))

    def seconds(self) -> float:
        self._pair.use_specdist_attention()
        return timed(self._runner.device, self.run)[0]


class _PlainPass:
    """transformers': the cache is cut back after every pass, outside of the time."""

    def __init__(self, paged: PagedPair, context_BC: Tensor, new_BN: Tensor) -> None:
        self._pair = paged.pair
        self._cache = DynamicCache()
        self._new_BN = new_BN.to(self._pair.device)
        self._pair.use_transformers_attention()
        self._forward(context_BC.to(self._pair.device))

    def seconds(self) -> float:
        self._pair.use_transformers_attention()
        seconds, _ = timed(self._pair.device, lambda: self._forward(self._new_BN))
        self._cache.crop(-self._new_BN.shape[1])
        return seconds

    def _forward(self, token_ids: Tensor) -> None:
        self._pair.target(input_ids=token_ids, past_key_values=self._cache, use_cache=True)


def _flat(token_ids_BN: Tensor, *, first: int) -> FlatBatch:
    """The rows one after the other, at positions from ``first`` on; slots are row numbers."""
    num_rows, num_tokens = token_ids_BN.shape
    lengths = np.full(num_rows, num_tokens)
    return FlatBatch(
        token_ids_BN.ravel().numpy(),
        np.repeat(np.arange(num_rows), lengths),
        first + arange_segments(lengths),
    )
