"""Tests attention kernels on this device, with random pages, before they are used, and times those of other
libraries.

Whether a kernel supports a dtype, a head width, a page size or a window depends on the device and on versions
of three libraries; its output is compared with attention in plain operations, one segment after the other, in
float32, which shares nothing with any kernel, and which compiled code has to give, too.

T flat tokens, S segments, L keys of one, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from specdist.models.attention.attention import AttentionCall, AttentionKind
from specdist.models.attention.kernel import PagedKernel
from specdist.models.attention.library_kernels import FlashAttention3Kernel, FlashInferKernel
from specdist.models.batch.flat import FlatBatch, PagedSegments, ragged_segments
from specdist.models.cache.key_value import to_float8
from specdist.utils.ranges import arange_segments
from specdist.utils.trial import Trial, check_difference, first_right, said_of, tolerance_of, why_not

# (new tokens, keys) of every segment: decoding steps, one with so many keys that a kernel splits them;
# verification blocks, padded in front if a sequence has fewer keys; a prefill mixed with both.
PROBES = (
    ((1, 1), (1, 38), (1, 2100)),
    ((5, 2), (5, 44), (5, 2105)),
    ((1, 64), (6, 301), (130, 130), (70, 520)),
)
SEED = 0
# exp(8) are 3000 keys.
MOST_SINK = 8.0
# Kernels of other libraries, which have to be faster than the project's by so much: a smaller difference
# might turn out otherwise at the next start, and the last bits of all numbers with it.
LIBRARIES = (FlashAttention3Kernel, FlashInferKernel)
LEAST_GAIN = 1.1
# What is timed, often enough for a clock: a long sequence alone, steps and verification blocks of a batch,
# and a chunk of a prompt. A library's kernel has to be faster in each of them.
TIMED = (((1, 8192),), 32 * ((1, 1100),), 16 * ((6, 1100),), ((512, 2048),))
NUM_TIMED, NUM_REPEATS = 20, 3

# Seconds that a device takes for what a function gives it.
Timer = Callable[[Callable[[], object]], float]

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class ProbePages:
    """What kernels are tried on: pages of so many tokens, with random numbers."""

    page_size: int
    dtype: torch.dtype
    device: torch.device
    is_float8: bool = False

    def __str__(self) -> str:
        in_bits = ", kept as float8" if self.is_float8 else ""
        return f"pages of {self.page_size} tokens in {self.dtype}{in_bits}"

    def random_pass(
        self, kind: AttentionKind, lengths: Sequence[tuple[int, int]], generator: torch.Generator
    ) -> tuple[AttentionCall, PagedSegments]:
        """Segments of ``lengths``, new tokens and keys of each, on scattered pages."""
        num_new_S, num_keys_S = np.array(lengths, np.int64).T
        width = -(-int(num_keys_S.max()) // self.page_size)
        num_pages, num_tokens = width * len(lengths), int(num_new_S.sum())
        page_table = np.random.default_rng(SEED).permutation(num_pages).reshape(len(lengths), width)
        batch = FlatBatch(
            np.zeros(num_tokens, np.int64),
            np.repeat(np.arange(len(lengths)), num_new_S),
            np.repeat(num_keys_S - num_new_S, num_new_S) + arange_segments(num_new_S),
        )
        segments, _ = ragged_segments(batch, page_table, self.page_size, self.device)
        of_pages = num_pages, self.page_size, kind.num_kv_heads
        value_width = kind.value_width or kind.width
        queries_THD, key_pages, value_pages = (
            torch.randn(size, generator=generator).to(self.device, self.dtype)
            for size in (
                (num_tokens, kind.num_heads, kind.width),
                (*of_pages, kind.width),
                (*of_pages, value_width),
            )
        )
        scales = None
        if self.is_float8:
            (key_pages, key_scales), (value_pages, value_scales) = map(to_float8, (key_pages, value_pages))
            scales = key_scales, key_scales if kind.rules.is_latent else value_scales
        if kind.rules.is_latent:
            value_pages = key_pages[..., :value_width]
        sinks_H = None
        if kind.rules.has_sinks:
            sinks_H = (MOST_SINK * torch.rand(kind.num_heads, generator=generator)).to(
                self.device, self.dtype
            )
        return AttentionCall(queries_THD, key_pages, value_pages, kind.rules, sinks_H, scales), segments


def choose_kernel(
    candidates: Sequence[PagedKernel],
    kinds: Sequence[AttentionKind],
    pages: ProbePages,
    *,
    timer: Timer | None = None,
    group: dist.ProcessGroup | None = None,
) -> PagedKernel | None:
    """The first kernel that is correct for every kind of attention; or one of another library that is, too,
    and faster by ``timer``. Logged with why others are not used.

    Args:
        group: ranks that share the model, and this choice: all of them call it. A kernel has to be correct on
            all, and its time is that of the slowest.
    """

    if not kinds:  # no layer attends
        return None

    def check(kernel: PagedKernel) -> None:
        reason = probe_kernel(kernel, kinds, pages)
        if _most([float(reason is not None)], group)[0]:
            raise ValueError(reason or "another rank of the model cannot use it")

    def first_of(*kernels: PagedKernel) -> Trial[PagedKernel]:
        return first_right({kernel.name: partial(_same, kernel) for kernel in kernels}, check)

    trial = first_of(*(kernel for kernel in candidates if not isinstance(kernel, LIBRARIES)))
    of_libraries = [first_of(kernel) for kernel in candidates if isinstance(kernel, LIBRARIES)]
    libraries = [each.found for each in of_libraries if each.found is not None]
    chosen, reasons = trial.found, dict(trial.reasons)
    for each in of_libraries:
        reasons |= each.reasons
    if chosen is not None and libraries:
        timer = timer or (lambda function: seconds_of(function, pages.device))
        timed = (chosen, *libraries)
        calls = [timed_call(kernel, kinds[0], pages, lengths) for kernel in timed for lengths in TIMED]
        seconds = np.reshape(_most([timer(call) for call in calls], group), (len(timed), -1))
        # At its worst, beside the project's.
        ratios = (seconds / seconds[0]).max(axis=1)
        fastest = 1 + int(ratios[1:].argmin())
        place = fastest if LEAST_GAIN * ratios[fastest] <= 1 else 0
        chosen = timed[place]
        reasons |= {
            kernel.name: f"takes up to {(own / seconds[place]).max():.2f} times as long"
            for kernel, own in zip(timed, seconds, strict=True)
            if kernel is not chosen
        }
    elif libraries:
        chosen = libraries[0]
    if candidates:
        name = "SDPA on gathered pages" if chosen is None else chosen.name
        logger.info("attention over %s: %s%s", pages, name, said_of(reasons))
    return chosen


def _same(kernel: PagedKernel) -> PagedKernel:
    return kernel


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
    kernel: PagedKernel, kind: AttentionKind, pages: ProbePages, lengths: Sequence[tuple[int, int]]
) -> Callable[[], Tensor]:
    """Attention of a layer of this kind to segments of these lengths, new tokens and keys."""
    call, segments = pages.random_pass(kind, lengths, torch.Generator().manual_seed(SEED))

    @torch.inference_mode()
    def attend() -> Tensor:
        return kernel.attend(call, segments)

    return attend


@torch.inference_mode()
def probe_kernel(kernel: PagedKernel, kinds: Sequence[AttentionKind], pages: ProbePages) -> str | None:
    """Why the kernel cannot be used for attention of these kinds; None if it can. With one of another library
    a segment also has to get the same bits alone as among others."""
    generator = torch.Generator().manual_seed(SEED)
    for kind in kinds:
        for lengths in PROBES:
            call, segments = pages.random_pass(kind, lengths, generator)
            if reason := why_not(partial(_check, kernel, call, segments)):
                heads = f"{kind.num_heads}/{kind.num_kv_heads} heads of {kind.width}"
                return f"{reason} ({heads}, window {kind.rules.window})"
    return None


def _check(kernel: PagedKernel, call: AttentionCall, segments: PagedSegments) -> None:
    expected_THD, found_THD = plain_attention(call, segments), kernel.attend(call, segments)
    error = float((found_THD.float() - expected_THD).abs().max())
    if isinstance(kernel, LIBRARIES):
        _check_alone(kernel, call, segments, found_THD)
    check_difference("differs from plain attention", error, tolerance_of("attention", call.queries_THD.dtype))


def _check_alone(
    kernel: PagedKernel, call: AttentionCall, segments: PagedSegments, found_THD: Tensor
) -> None:
    for index, (begin, end) in enumerate(itertools.pairwise(segments.query_starts_S1.tolist())):
        own = slice(index, index + 1)
        alone = dataclasses.replace(
            segments,
            block_table_SP=segments.block_table_SP[own],
            used_S=segments.used_S[own],
            query_starts_S1=torch.tensor([0, end - begin], dtype=torch.int32, device=found_THD.device),
        )
        found = kernel.attend(call._replace(queries_THD=call.queries_THD[begin:end]), alone)
        if not torch.equal(found, found_THD[begin:end]):
            raise ValueError("a sequence's numbers depend on the others")
