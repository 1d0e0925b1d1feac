"""Attention kernels that run on a CPU: a right one and some wrong ones."""

from __future__ import annotations

import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionRules
from specdist.models.attention.probe import plain_attention
from specdist.models.passes.segments import PagedSegments


class PlainKernel:
    """Right for every kind of segments; counts its calls."""

    name = "plain"

    def __init__(self) -> None:
        self.num_calls = 0

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, segments: PagedSegments, rules: AttentionRules
    ) -> Tensor:
        self.num_calls += 1
        return plain_attention(queries, keys, values, segments, rules).to(queries.dtype)


class RaisingKernel(PlainKernel):
    name = "raising"

    def attend(self, *args: object) -> Tensor:
        raise RuntimeError("page size must be divisible by 256\nand a trace of calls")


class WindowlessKernel(PlainKernel):
    """Ignores the sliding window."""

    name = "windowless"

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, segments: PagedSegments, rules: AttentionRules
    ) -> Tensor:
        return super().attend(queries, keys, values, segments, rules._replace(window=None))


class StaleKernel(PlainKernel):
    """Leaves out the newest key of every segment that has more than one."""

    name = "stale"

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, segments: PagedSegments, rules: AttentionRules
    ) -> Tensor:
        output = super().attend(queries, keys, values, segments, rules)
        return torch.roll(output, 1, dims=0)


class NanKernel(PlainKernel):
    name = "nan"

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, segments: PagedSegments, rules: AttentionRules
    ) -> Tensor:
        return super().attend(queries, keys, values, segments, rules).fill_(torch.nan)
