"""Tests attention kernels on this device, with random pages, before they are used, and times those of other
libraries.

Whether a kernel supports a dtype, a head width, a page size or a window depends on the device and on versions
of three libraries; its output is compared with plain attention in float32.

T flat tokens, S segments, L keys per segment, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from specdist.models.attention.attention import AttentionKind, AttentionRules
from specdist.models.attention.kernel import PagedKernel
from specdist.models.attention.library_kernels import FlashAttention3Kernel, FlashInferKernel
from specdist.models.passes.flat import FlatBatch
from specdist.models.passes.segments import PagedSegments, ragged_segments
from specdist.utils.errors import short_text
from specdist.utils.ranges import arange_segments

# (new tokens, keys) of every segment: decoding steps, one with so many keys that a kernel splits them;
# verification blocks, padded in front if a sequence has fewer keys; a prefill mixed with both.
PROBES = (
    ((1, 1), (1, 38), (1, 2100)),
    ((5, 2), (5, 44), (5, 2105)),
    ((1, 64), (6, 301), (130, 130), (70, 520)),
)
# An output is an average of values of order 1, rounded to the dtype at the end and between.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
SEED = 0
# Kernels of other libraries, which have to be faster than the project's by so much: a smaller difference
# might turn out otherwise at the next start, and the last bits of all numbers with it.
LIBRARIES = (FlashAttention3Kernel, FlashInferKernel)
LEAST_GAIN = 1.1
# What is timed: verification blocks of a batch, often enough for a clock.
TIMED_SEGMENTS, NUM_TIMED, NUM_REPEATS = 16 * ((6, 1100),), 20, 3

# Seconds that a device takes for what a function gives it.
Timer = Callable[[Callable[[], object]], float]

logger = logging.getLogger(__name__)


def choose_kernel(
    candidates: Sequence[PagedKernel],
    kinds: Sequence[AttentionKind],
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    timer: Timer | None = None,
    group: dist.ProcessGroup | None = None,
) -> PagedKernel | None:
    """The first kernel that is correct for every kind of attention; or one of another library that is, too,
    and faster by ``timer``. Logged with why others are not used.

    Args:
        group: ranks that share the model, and this choice: all of them call it. A kernel has to be correct on
            all, and its time is that of the slowest.
    """
    common = {"page_size": page_size, "dtype": dtype, "device": device}
    reasons = []
    libraries: list[PagedKernel] = []
    chosen: PagedKernel | None = None
    for kernel in candidates:
        is_library = isinstance(kernel, LIBRARIES)
        if chosen is not None and not is_library:
            continue
        reason = probe_kernel(kernel, kinds, is_compared_alone=is_library, **common)  # type: ignore[arg-type]
        if _most([float(reason is not None)], group)[0] and reason is None:
            reason = "another rank of the model cannot use it"
        if reason is not None:
            reasons.append(f"{kernel.name}: {reason}")
        elif is_library:
            libraries.append(kernel)
        else:
            chosen = kernel
    if chosen is not None and libraries:
        timer = timer or (lambda function: seconds_of(function, device))
        timed = (chosen, *libraries)
        own = [timer(timed_call(kernel, kinds[0], **common)) for kernel in timed]  # type: ignore[arg-type]
        seconds = dict(zip(timed, _most(own, group), strict=True))
        fastest = min(libraries, key=seconds.__getitem__)
        if seconds[chosen] >= LEAST_GAIN * seconds[fastest]:
            chosen = fastest
        reasons += [
            f"{kernel.name}: takes {number / seconds[chosen]:.2f} times as long"
            for kernel, number in seconds.items()
            if kernel is not chosen
        ]
    elif libraries:
        chosen = libraries[0]
    if candidates:
        name = "SDPA on gathered pages" if chosen is None else chosen.name
        refused = f"; not used: {'; '.join(reasons)}" if reasons else ""
        logger.info("attention over pages of %d tokens in %s: %s%s", page_size, dtype, name, refused)
    return chosen


def _most(numbers: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """The largest of the group's numbers at each place."""
    most = torch.tensor(numbers, dtype=torch.float64)
    if group is not None:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    largest: list[float] = most.tolist()
    return largest


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """The least of several times, after a call that may compile."""
    function()
    times = []
    for _ in range(NUM_REPEATS):
        torch.cuda.synchronize(device)
        begin_ns = time.perf_counter_ns()
        for _ in range(NUM_TIMED):
            function()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - begin_ns)
    return min(times) / 1e9


def timed_call(
    kernel: PagedKernel, kind: AttentionKind, *, page_size: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Attention of a layer of this kind in a pass as most are."""
    segments, shape = _probe_segments(TIMED_SEGMENTS, page_size, device)
    tensors = _random_tensors(
        kind, int(segments.query_starts_S1[-1]), shape, dtype, device, torch.Generator().manual_seed(SEED)
    )

    @torch.inference_mode()
    def attend() -> Tensor:
        return kernel.attend(*tensors, segments, kind.rules)

    return attend


def _random_tensors(
    kind: AttentionKind,
    num_tokens: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], and keys and values [pages, page size, G, D]."""
    of_queries = num_tokens, kind.num_heads, kind.width
    of_pages = *shape, kind.num_kv_heads, kind.width
    queries_THD, key_pages, value_pages = (
        torch.randn(size, generator=generator).to(device, dtype) for size in (of_queries, of_pages, of_pages)
    )
    return queries_THD, key_pages, value_pages


@torch.inference_mode()
def probe_kernel(
    kernel: PagedKernel,
    kinds: Sequence[AttentionKind],
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    is_compared_alone: bool = False,
) -> str | None:
    """Why the kernel cannot be used for attention of these kinds; None if it can. ``is_compared_alone``: a
    segment has to get the same bits alone as among others."""
    generator = torch.Generator().manual_seed(SEED)
    for kind in kinds:
        about = f"{kind.num_heads}/{kind.num_kv_heads} heads of {kind.width}, window {kind.rules.window}"
        for lengths in PROBES:
            segments, shape = _probe_segments(lengths, page_size, device)
            num_tokens = sum(num_new for num_new, _ in lengths)
            tensors = _random_tensors(kind, num_tokens, shape, dtype, device, generator)
            queries_THD, key_pages, value_pages = tensors
            expected = plain_attention(queries_THD, key_pages, value_pages, segments, kind.rules)
            try:
                found = kernel.attend(queries_THD, key_pages, value_pages, segments, kind.rules)
                error = float((found.float() - expected).abs().max())
                if is_compared_alone and not _is_same_alone(kernel, found, tensors, segments, kind.rules):
                    return f"a sequence's numbers depend on the others ({about})"
            except Exception as failure:  # kernels, their compilers and drivers raise errors of many kinds
                return f"{short_text(failure)} ({about})"
            # Not "error > tolerance": NaN is also wrong.
            if not error <= TOLERANCES[dtype]:
                return f"differs from plain attention by {error:.3g} ({about})"
    return None


def _is_same_alone(
    kernel: PagedKernel,
    found_THD: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    segments: PagedSegments,
    rules: AttentionRules,
) -> bool:
    queries_THD, key_pages, value_pages = tensors
    starts = segments.query_starts_S1.tolist()
    for index, (begin, end) in enumerate(itertools.pairwise(starts)):
        own = slice(index, index + 1)
        alone = dataclasses.replace(
            segments,
            block_table_SP=segments.block_table_SP[own],
            used_S=segments.used_S[own],
            query_starts_S1=torch.tensor([0, end - begin], dtype=torch.int32, device=queries_THD.device),
        )
        found = kernel.attend(queries_THD[begin:end], key_pages, value_pages, alone, rules)
        if not torch.equal(found, found_THD[begin:end]):
            return False
    return True


def plain_attention(
    queries_THD: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    segments: PagedSegments,
    rules: AttentionRules,
) -> Tensor:
    """Attention of one segment after the other, in float32: [T, H, D]."""
    outputs = []
    used = segments.used_S.tolist()
    starts = segments.query_starts_S1.tolist()
    num_repeats = queries_THD.shape[1] // key_pages.shape[2]
    for index, (num_keys, begin, end) in enumerate(zip(used, starts[:-1], starts[1:], strict=True)):
        keys_HLD, values_HLD = (
            pages[segments.block_table_SP[index].long()]
            .flatten(0, 1)[:num_keys]
            .float()
            .repeat_interleave(num_repeats, dim=1)
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
        scores_HQL.masked_fill_((ages_QL < 0) | (ages_QL >= window), -torch.inf)
        # A query before the first key has no key to attend to: its output is zero.
        probabilities_HQL = F.softmax(scores_HQL, dim=-1).nan_to_num(0.0)
        outputs.append((probabilities_HQL @ values_HLD).transpose(0, 1))
    return torch.cat(outputs)


def _probe_segments(
    lengths: Sequence[tuple[int, int]], page_size: int, device: torch.device
) -> tuple[PagedSegments, tuple[int, int]]:
    """Segments on scattered pages, and (pages, page size) of the memory that they need."""
    num_new_S, num_keys_S = np.array(lengths, np.int64).T
    width = -(-int(num_keys_S.max()) // page_size)
    num_pages = width * len(lengths)
    page_table = np.random.default_rng(SEED).permutation(num_pages).reshape(len(lengths), width)
    batch = FlatBatch(
        np.zeros(num_new_S.sum(), np.int64),
        np.repeat(np.arange(len(lengths)), num_new_S),
        np.repeat(num_keys_S - num_new_S, num_new_S) + arange_segments(num_new_S),
    )
    segments, _ = ragged_segments(batch, page_table, page_size, device)
    return segments, (num_pages, page_size)
