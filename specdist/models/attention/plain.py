"""Attention in plain operations, one segment after the other: what kernels and compiled code have to give.

It shares nothing with any of them.

T flat tokens, L keys of a segment, H heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdist.models.attention.attention import AttentionCall
from specdist.models.batch.segments import PagedSegments


def plain_attention(call: AttentionCall, segments: PagedSegments) -> Tensor:
    """Attention over pages, in float32: [T, H, D]."""
    queries_THD, key_pages, value_pages, rules, sinks_H, scales = call
    if scales is not None:
        # Sums are in float32, so that nothing is rounded in between.
        key_pages, value_pages = (
            pages.view(torch.float8_e4m3fn).float() * own.float()[..., None]
            for pages, own in zip((key_pages, value_pages), scales, strict=True)
        )
    outputs = []
    starts = segments.query_starts_S1.tolist()
    used = segments.used_S.tolist()
    for pages_P, num_keys, begin, end in zip(
        segments.block_table_SP.long(), used, starts[:-1], starts[1:], strict=True
    ):
        keys_HLD, values_HLD = (
            pages[pages_P]
            .flatten(0, 1)[:num_keys]
            .float()
            .repeat_interleave(call.num_repeats, dim=1)
            .transpose(0, 1)
            for pages in (key_pages, value_pages)
        )
        queries_HQD = queries_THD[begin:end].float().transpose(0, 1)
        scale = queries_THD.shape[2] ** -0.5 if rules.scale is None else rules.scale
        scores_HQL = scale * queries_HQD @ keys_HLD.transpose(1, 2)
        if rules.softcap is not None:
            scores_HQL = rules.softcap * torch.tanh(scores_HQL / rules.softcap)
        ages_QL = (torch.arange(num_keys - (end - begin), num_keys)[:, None] - torch.arange(num_keys)).to(
            scores_HQL.device
        )
        window = num_keys if rules.window is None else rules.window
        is_later_QL = (ages_QL < 0) & rules.is_causal
        scores_HQL.masked_fill_(is_later_QL | (ages_QL >= window), -torch.inf)
        if rules.hides_first:
            scores_HQL[:, ages_QL[:, 0] > 0, 0] = -torch.inf
        # A query before the first key has no key to attend to: its output is zero.
        if sinks_H is None:
            probabilities_HQL = F.softmax(scores_HQL, dim=-1).nan_to_num(0.0)
        else:
            sums_HQ = torch.logaddexp(scores_HQL.logsumexp(-1), sinks_H.float()[:, None])
            probabilities_HQL = torch.exp(scores_HQL - sums_HQ[..., None])
        outputs.append((probabilities_HQL @ values_HLD).transpose(0, 1))
    return torch.cat(outputs)
