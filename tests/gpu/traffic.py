"""What a kernel reads from the device's memory and writes to it, from the sizes of its tensors.

Every operator is taken to read each of its tensors once and to write its results once, as if nothing stayed
in a cache from one kernel to the next. What differs is written down here: operators that read some lines of a
table or write some, and attention over pages.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from tests.gpu.operators import Operator, argument

# They read as much of the first tensor as they return.
READING_LINES = frozenset(["index_select", "index", "gather", "embedding", "_unsafe_index"])
# They write lines into the first tensor; the position of the lines among the arguments.
WRITING_LINES = {"index_copy_": 3, "index_put_": 2, "_index_put_impl_": 2, "scatter_": 3}
# What is in the first tensor is not read.
OVERWRITING = frozenset(["copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "random_"])
PAGED_ATTENTION, VARLEN_ATTENTION = "paged_attention", "_varlen_attn"
# An operator of the project that writes to a tensor so many times as large as all others together writes
# lines of it: the cache's.
CACHE_FACTOR = 2
WEIGHTS, CACHE, REST = KINDS = ("weights", "cache", "other tensors")
FLOAT_BYTES = 4


def moved_bytes(
    operator: Operator,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    weights: Collection[int] = (),
) -> Counter[str]:
    """Bytes of a launch of the operator, by :data:`KINDS`; ``weights`` are addresses (:func:`address`)."""
    moved: Counter[str] = Counter()
    tensors = list(_tensors([*args, *kwargs.values()]))
    results = list(_tensors([result]))
    if not operator.has_kernel or not (tensors or results):
        return moved
    if operator.name == PAGED_ATTENTION:
        names = ("max_queries", "max_keys", "max_split_bytes")
        return _attention(*tensors[:6], **{name: kwargs[name] for name in names})
    if operator.name == VARLEN_ATTENTION:
        return _varlen_attention(args, kwargs)
    if operator.name in READING_LINES:
        moved[REST] = 2 * sum(map(_bytes, results)) + sum(map(_bytes, tensors[1:]))
        return moved
    if operator.name in WRITING_LINES:
        lines = args[WRITING_LINES[operator.name]]
        moved[REST] = _bytes(lines) + sum(map(_bytes, tensors[1:]))
        return moved
    written = list(_tensors([argument(at, args, kwargs) for at in operator.written]))
    others = [tensor for tensor in tensors if all(tensor is not one for one in written)]
    for tensor in others:
        moved[WEIGHTS if address(tensor) in weights else REST] += _bytes(tensor)
    for tensor in written:
        if _bytes(tensor) > CACHE_FACTOR * moved[REST] > 0 and operator.name not in OVERWRITING:
            moved[REST] += sum(map(_bytes, others)) // len(written)
        else:
            moved[REST] += _bytes(tensor) * (1 if operator.name in OVERWRITING else 2)
    if operator.takes_memory:
        moved[REST] += sum(_bytes(new) for new in operator.new_results(result) if new.is_cuda)
    return moved


def _attention(
    queries_THD: Any,
    key_pages: Any,
    value_pages: Any,
    block_table_SP: Any,
    used_S: Any,
    query_starts_S1: Any,
    *,
    max_queries: int,
    max_keys: int,
    max_split_bytes: int,
) -> Counter[str]:
    """As :mod:`specdist.kernels.paged_attention` works: a tile of queries reads its segment's keys and
    values, and splits that are programs of their own leave float32 numbers for the join."""
    kernels = importlib.import_module("specdist.kernels.paged_attention")
    num_tokens, num_heads, width = queries_THD.shape
    num_kv_heads = key_pages.shape[2]
    num_repeats = num_heads // num_kv_heads
    tile = kernels.Tile.of(width, num_repeats, queries_THD.dtype, max_queries).num_rows // num_repeats
    num_reads_S = -(-query_starts_S1.host.diff() // tile)
    num_splits = -(-max_keys // kernels.SPLIT_KEYS)
    num_tiles = num_tokens // tile + len(used_S)
    split_bytes = num_tokens * num_heads * num_splits * (width + 2) * FLOAT_BYTES
    needs_programs = num_tiles * num_kv_heads < kernels.MIN_PROGRAMS
    is_split = num_splits > 1 and needs_programs and split_bytes <= max_split_bytes
    moved: Counter[str] = Counter()
    moved[CACHE] = int((used_S.host * num_reads_S).sum()) * _bytes_per_key(key_pages, value_pages)
    moved[REST] = 2 * _bytes(queries_THD) + 2 * is_split * split_bytes + _bytes(used_S)
    return moved


def _varlen_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Counter[str]:
    """FlashAttention over pages or over segments that lie one after the other."""
    queries_THD, keys, values, _, key_starts = args[:5]
    used = next((one for one in (kwargs.get("seqused_k"), *args[11:12]) if one is not None), None)
    lengths_S = key_starts.host.diff() if used is None else used.host
    return Counter(
        {CACHE: int(lengths_S.sum()) * _bytes_per_key(keys, values), REST: 2 * _bytes(queries_THD)}
    )


def _bytes_per_key(keys: Any, values: Any) -> int:
    """Of all heads: the last two dimensions."""
    return sum(tensor.shape[-2] * tensor.shape[-1] * tensor.element_size() for tensor in (keys, values))


def address(tensor: Any) -> int:
    """The same for a tensor of the device and for its views."""
    return int(tensor.host.untyped_storage().data_ptr())


def _bytes(tensor: Any) -> int:
    """Without what is only repeated, such as a line that is expanded."""
    number = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else min(size, 1)
    return number


def _tensors(values: Any) -> Iterator[Any]:
    """Those on the device."""
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
