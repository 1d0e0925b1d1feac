"""The project's own kernels as they answer on a device: plain implementations, by the operators' names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdist.models.attention import AttentionRules
from specdist.models.probe import plain_attention
from specdist.models.segments import PagedSegments
from specdist.sampling.coupling import waiting_times_of
from specdist.sampling.distributions import Dense, OneHot
from specdist.sampling.filters import plain_probabilities


def paged_attention(
    queries_THD: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table_SP: Tensor,
    used_S: Tensor,
    query_starts_S1: Tensor,
    *,
    max_keys: int,
    max_split_bytes: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    del max_split_bytes
    assert int(used_S.max()) <= max_keys, "a segment has more keys than max_keys says"
    segments = PagedSegments(block_table_SP, used_S, query_starts_S1, len(queries_THD), max_keys)
    rules = AttentionRules(scale, window, softcap, {})
    return plain_attention(queries_THD, key_pages, value_pages, segments, rules).to(queries_THD.dtype)


def draw(probabilities_NV: Tensor, uniforms_N: Tensor, *, not_finite: int) -> Tensor:
    del not_finite
    return Dense(probabilities_NV).draw(uniforms_N)


def race(probabilities_NV: Tensor, words_N: Tensor, *, not_finite: int, first_id: int = 0) -> Tensor:
    del not_finite
    waiting_NV = waiting_times_of(words_N, range(first_id, first_id + probabilities_NV.shape[1]))
    return OneHot.of_largest(torch.log(probabilities_NV / waiting_NV)).token_ids_N


ON_HOST: dict[str, Callable[..., Tensor]] = {
    "paged_attention": paged_attention,
    "processed_probabilities": plain_probabilities,
    "draw": draw,
    "race": race,
}
