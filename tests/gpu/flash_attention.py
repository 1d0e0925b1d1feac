"""torch's ``varlen_attn`` as FlashAttention-2 does it: its checks of the arguments, then plain attention.

T queries, S segments, L keys of a segment, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAGE_MULTIPLE = 256
WIDTH_MULTIPLE = 8
MAX_HEAD_WIDTH = 256
UNLIMITED = -1


def flash_attention(
    queries_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts_S1: Tensor,
    key_starts_S1: Tensor | None,
    max_queries: int,
    max_keys: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of ``torch_attn::_varlen_attn``, all tensors on the host.

    Returns the output [T, H, D], and placeholders for the other two results. Raises RuntimeError with what
    FlashAttention-2 says of arguments that it does not take.
    """
    # Every number of keys comes from it, even if the lengths of the segments are given as well.
    _check(key_starts_S1 is not None, "cu_seqlens_k must be provided for FlashAttention-2")
    assert key_starts_S1 is not None
    _check_types(queries_THD, keys, values, query_starts_S1, key_starts_S1, seqused_k, block_table)
    num_segments = query_starts_S1.numel() - 1
    num_heads, width = queries_THD.shape[1:]
    num_kv_heads = keys.shape[-2]
    _check(num_segments > 0, "batch size must be positive")
    _check(width <= MAX_HEAD_WIDTH, "FlashAttention forward only supports head dimension at most 256")
    _check(width % WIDTH_MULTIPLE == 0, "head_size must be a multiple of 8, this is ensured by padding!")
    _check(num_heads % num_kv_heads == 0, "Number of heads in key/value must divide number of heads in query")
    _check(key_starts_S1.shape == (num_segments + 1,), "cu_seqlens_k has the wrong shape")
    _check(seqused_k is None or seqused_k.shape == (num_segments,), "seqused_k has the wrong shape")
    if block_table is not None:
        _check(keys.shape[1] % PAGE_MULTIPLE == 0, "Paged KV cache block size must be divisible by 256")
        _check(len(block_table) == num_segments, "block_table has the wrong shape")

    starts, key_starts = query_starts_S1.tolist(), key_starts_S1.tolist()
    used = key_starts_S1.diff().tolist() if seqused_k is None else seqused_k.tolist()
    left, right = window_size or (UNLIMITED, 0 if is_causal else UNLIMITED)
    scale = width**-0.5 if scale is None else scale
    # Tokens outside all segments are not written, as on a GPU.
    output_THD = torch.empty(queries_THD.shape).fill_(torch.nan)
    for segment, num_keys in enumerate(used):
        begin, end = starts[segment : segment + 2]
        _check(end - begin <= max_queries, "a segment has more queries than max_q says")
        _check(num_keys <= max_keys, "a segment has more keys than max_k says")
        if block_table is None:
            first = key_starts[segment]
            own = [tensor[first : first + num_keys] for tensor in (keys, values)]
        else:
            pages = block_table[segment].long()
            own = [tensor[pages].flatten(0, 1)[:num_keys] for tensor in (keys, values)]
        keys_HLD, values_HLD = (
            tensor.float().repeat_interleave(num_heads // num_kv_heads, 1).transpose(0, 1) for tensor in own
        )
        scores_HTL = scale * queries_THD[begin:end].float().transpose(0, 1) @ keys_HLD.transpose(1, 2)
        # The queries are the last of the segment's tokens.
        ahead_TL = torch.arange(num_keys) - torch.arange(num_keys - (end - begin), num_keys)[:, None]
        hidden_TL = (ahead_TL > right) & (right >= 0) | (ahead_TL < -left) & (left >= 0)
        scores_HTL.masked_fill_(hidden_TL, -torch.inf)
        output_THD[begin:end] = (scores_HTL.softmax(-1).nan_to_num(0.0) @ values_HLD).transpose(0, 1)
    log_sums_HT, random_state = torch.zeros(num_heads, len(queries_THD)), torch.zeros(2, dtype=torch.uint64)
    return output_THD.to(queries_THD.dtype), log_sums_HT, random_state


def _check_types(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Dtypes and the order in memory."""
    _check(
        queries.dtype in (torch.float16, torch.bfloat16),
        "FlashAttention only support fp16 and bf16 data type",
    )
    _check(keys.dtype == queries.dtype, "query and key must have the same dtype")
    _check(values.dtype == queries.dtype, "query and value must have the same dtype")
    integers = {"cu_seqlens_q": query_starts, "cu_seqlens_k": key_starts, "seqused_k": seqused_k}
    for name, tensor in integers.items():
        _check(tensor is None or tensor.dtype == torch.int32, f"{name} must have dtype int32")
        _check(tensor is None or tensor.is_contiguous(), f"{name} must be contiguous")
    if block_table is not None:
        _check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
        _check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    for tensor in (queries, keys, values):
        _check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise RuntimeError(message)
