"""Attention kernels that run on a CPU: a right one and some wrong ones."""

from __future__ import annotations

import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionCall
from specdist.models.attention.probe import plain_attention
from specdist.models.batch.flat import PagedSegments


class PlainKernel:
    """Right for every kind of segments; counts its calls."""

    name = "plain"

    def __init__(self) -> None:
        self.num_calls = 0

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        self.num_calls += 1
        return plain_attention(call, segments).to(call.queries_THD.dtype)


class RaisingKernel(PlainKernel):
    name = "raising"

    def attend(self, *args: object) -> Tensor:
        raise RuntimeError("page size must be divisible by 256\nand a trace of calls")


class WindowlessKernel(PlainKernel):
    """Ignores the sliding window."""

    name = "windowless"

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        return super().attend(call._replace(rules=call.rules._replace(window=None)), segments)


class SinklessKernel(PlainKernel):
    """Ignores the sinks."""

    name = "sinkless"

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        return super().attend(call._replace(sinks_H=None), segments)


class StaleKernel(PlainKernel):
    """Leaves out the newest key of every segment that has more than one."""

    name = "stale"

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        output = super().attend(call, segments)
        return torch.roll(output, 1, dims=0)


class NanKernel(PlainKernel):
    name = "nan"

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        return super().attend(call, segments).fill_(torch.nan)
