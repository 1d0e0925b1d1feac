"""Attention over pages by other libraries, where they are installed: FlashAttention-3, made for GPUs of the
Hopper generation, and TensorRT-LLM's kernels in FlashInfer, made for Blackwell.

Each takes tensors alone, so that a pass with it can be recorded. :mod:`specdist.models.attention.probe`
decides at the start whether one is used. Of FlashInfer only these kernels can be: its others want the
lengths of every pass on the host (for latents ``BatchMLAPagedAttentionWrapper.plan``), or as many queries of
each sequence, like FlashMLA, whose pages have 64 tokens.

T flat tokens, S segments, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionCall, AttentionRules
from specdist.models.batch.flat import PagedSegments

UNLIMITED = -1
NO_SCALES = "it reads no scale of each token"
HIDES_NONE = "it hides no sequence's first token"
# FlashInfer's scratch memory, zeros at first.
WORKSPACE_BYTES = 2**27


class FlashAttention3Kernel:
    """``flash_attn_interface`` of https://github.com/Dao-AILab/flash-attention (folder ``hopper``).
    ``num_splits``: of each sequence's keys; where the batch decides, its numbers depend on the others."""

    def __init__(self, num_splits: int = 1) -> None:
        self.name = "FlashAttention-3 on pages" + f" in {num_splits} splits" * (num_splits > 1)
        self._num_splits = num_splits

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        queries_THD, key_pages, value_pages, rules, sinks_H, scales = call
        from flash_attn_interface import flash_attn_with_kvcache

        if scales is not None:
            raise ValueError(NO_SCALES)
        if rules.hides_first:
            raise ValueError(HIDES_NONE)
        if rules.is_latent:
            raise ValueError("it is not asked for latent attention")
        output = flash_attn_with_kvcache(
            queries_THD,
            key_pages,
            value_pages,
            cache_seqlens=segments.used_S,
            page_table=segments.block_table_SP,
            cu_seqlens_q=segments.query_starts_S1,
            max_seqlen_q=segments.num_queries,
            softmax_scale=rules.scale,
            causal=rules.is_causal,
            window_size=(_keys_before(rules), UNLIMITED if rules.window is None else 0),
            softcap=rules.softcap or 0.0,
            num_splits=self._num_splits,
            return_softmax_lse=sinks_H is not None,
        )
        if sinks_H is not None:
            # By so much the sum of the weights is larger with the sink.
            output, sums_HT, *_ = output
            factors_HT = 1 + torch.exp(sinks_H[:, None] - sums_HT)
            output = (output / factors_HT.T[..., None]).to(output.dtype)
        assert isinstance(output, Tensor)
        return output


class FlashInferKernel:
    """``flashinfer.prefill.trtllm_batch_context_with_kv_cache``, https://docs.flashinfer.ai."""

    name = "FlashInfer on pages"

    def __init__(self) -> None:
        self._workspace: Tensor | None = None

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        queries_THD, key_pages, value_pages, rules, sinks_H, scales = call
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        if scales is not None:
            raise ValueError(NO_SCALES)
        if rules.hides_first:
            raise ValueError(HIDES_NONE)
        if rules.softcap is not None or not rules.is_causal:
            raise ValueError("it takes no soft cap, and hides later tokens")
        if value_pages.shape[-1] != key_pages.shape[-1]:
            raise ValueError("it takes keys and values of one width")
        if self._workspace is None:
            size = {"dtype": torch.uint8, "device": queries_THD.device}
            self._workspace = torch.zeros(WORKSPACE_BYTES, **size)  # type: ignore[call-overload]
        key_starts_S1 = torch.zeros_like(segments.query_starts_S1)
        torch.cumsum(segments.used_S, 0, dtype=torch.int32, out=key_starts_S1[1:])
        output = trtllm_batch_context_with_kv_cache(
            queries_THD.contiguous(),
            # Views: given as they are (NHD), all pages would be copied.
            (key_pages.transpose(1, 2), value_pages.transpose(1, 2)),
            self._workspace,
            segments.block_table_SP,
            segments.used_S,
            segments.num_queries,
            segments.num_keys,
            queries_THD.shape[2] ** -0.5 if rules.scale is None else rules.scale,
            1.0,
            len(segments.used_S),
            segments.query_starts_S1,
            key_starts_S1,
            window_left=_keys_before(rules),
            kv_layout="HND",
            # Versions without sinks do not know the name.
            **({} if sinks_H is None else {"sinks": sinks_H.float()}),
        )
        assert isinstance(output, Tensor)
        return output


def _keys_before(rules: AttentionRules) -> int:
    """The number of keys before a query that it sees."""
    return UNLIMITED if rules.window is None else rules.window - 1
