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
        assert int(segments.query_starts_S1.diff().max()) <= segments.num_queries
        return plain_attention(call, segments).to(call.queries_THD.dtype)


class WrongKernel(PlainKernel):
    """In the way that its name says."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        if self.name == "raising":
            raise RuntimeError("page size must be divisible by 256\nand a trace of calls")
        if self.name == "windowless":
            call = call._replace(rules=call.rules._replace(window=None))
        if self.name == "sinkless":
            call = call._replace(sinks_H=None)
        output = super().attend(call, segments)
        if self.name == "another token's":
            output = torch.roll(output, 1, dims=0)
        return output.fill_(torch.nan) if self.name == "nan" else output
