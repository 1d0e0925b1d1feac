"""Recorded passes of a model of 8B: what a graph needs of memory, and how much faster a replay is.

    python -m tests.gpu.first_graphs FOLDER [--fake]

Random weights, made on the device. The passes first run unrecorded, so that what is loaded or compiled at the
first run of a kernel is there; then others like them are recorded. What the device has less then, beside what
torch's allocator holds, is the graphs' own.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageTable
from specdist.models.families.adapters import use_paged_attention
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.graphs import CudaGraphs
from specdist.models.passes.runner import ModelRunner
from specdist.models.sizes.reserve import KERNELS_PER_LAYER, OTHER_KERNELS
from tests.gpu.first_device import Bench, random_llama, say, step, table

MODEL = "8B"
NUM_GRAPHS, TINY_NUM_GRAPHS = 30, 4
# Sequences of a pass and new tokens of each: a bucket, and so a graph, for each pair.
NUM_ROWS, NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8)
# Those of which times are shown: decoding, and verification.
TIMED = ((1, 1), (32, 1), (1, 8), (32, 8), (128, 8))
CONTEXT, TINY_CONTEXT = 512, 20
PAGE_SIZE = 16
NUM_TIMES, TINY_NUM_TIMES = 10, 1


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of a pass with the host's work for it, unrecorded and replayed."""

    num_rows: int
    num_tokens: int
    eager_s: float
    replayed_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return step(str(__doc__).partition("\n")[0], record_all, arguments)


def record_all(bench: Bench, folder: Path) -> int:
    shape, context = bench.shapes[MODEL], TINY_CONTEXT if bench.is_fake else CONTEXT
    model = random_llama(bench, shape)
    use_paged_attention(model)
    sizes = list(passes())[: TINY_NUM_GRAPHS if bench.is_fake else NUM_GRAPHS]
    timed = [size for size in sizes if size in TIMED]
    eager = runner_of(bench, model, context, is_recorded=False)
    for size in sizes:
        eager.forward(*batch_of(context, *size))
    eager_s = {size: pass_s(bench, eager, context, *size) for size in timed}
    del eager
    gc.collect()  # a runner and its passes refer to one another
    runner = runner_of(bench, model, context, is_recorded=True)
    assert runner._static is not None
    before_bytes = bytes_beside_allocator(bench)
    for size in sizes:
        runner.forward(*batch_of(context, *size))
    graph_bytes = bytes_beside_allocator(bench) - before_bytes
    num_recorded = len(runner._static._graphs._replays)
    num_nodes = KERNELS_PER_LAYER * shape.num_layers + OTHER_KERNELS
    times = [
        PassTimes(
            num_rows=rows,
            num_tokens=tokens,
            eager_s=eager_s[rows, tokens],
            replayed_s=pass_s(bench, runner, context, rows, tokens),
        )
        for rows, tokens in timed
    ]
    say(table(times))
    node_bytes = graph_bytes / num_nodes / max(1, num_recorded)
    say(f"\n{num_recorded} of {len(sizes)} passes recorded: {graph_bytes} bytes beside the allocator")
    say(f"{node_bytes:.0f} bytes for each of {num_nodes} kernels of a pass, as the reserve counts them")
    bench.write(
        folder / "graphs.json",
        {
            "num_recorded": num_recorded,
            "graph_bytes": graph_bytes,
            "graph_node_bytes": node_bytes,
            "passes": [asdict(one) for one in times],
        },
    )
    if num_recorded < len(sizes):
        say("a pass was not recorded, or its replay differed from it: the log says why")
        return 1
    return 0


def passes() -> Iterator[tuple[int, int]]:
    """The timed ones first."""
    yield from TIMED
    yield from (size for size in itertools.product(NUM_ROWS, NUM_TOKENS) if size not in TIMED)


def runner_of(bench: Bench, model: PreTrainedModel, context: int, *, is_recorded: bool) -> ModelRunner:
    """As a job makes it, but for the graphs."""
    usual = Acceleration.of(bench.device)
    acceleration = Acceleration(
        is_static=True,
        capturer=CudaGraphs(bench.device) if is_recorded else None,
        kernels=usual.kernels,
        is_fused=usual.is_fused,
    )
    runner = ModelRunner(model, bench.device, acceleration)
    length, num_slots = context + max(NUM_TOKENS), max(NUM_ROWS)
    num_pages = num_slots * -(-length // PAGE_SIZE)
    runner.allocate(num_pages=num_pages, page_size=PAGE_SIZE, num_slots=num_slots, max_seq_len=length)
    cache = runner.cache.key_value
    for numbers in (*cache.keys.values(), *cache.values.values()):
        numbers.normal_()
    pages = PageTable(num_pages=num_pages, page_size=PAGE_SIZE, num_slots=num_slots)
    for slot in range(num_slots):
        # Other first tokens, so that no pages are shared.
        pages.open(slot, [slot] * context)
        pages.extend(slot, length)
    runner.update_pages(pages.drain_updates())
    return runner


def batch_of(context: int, num_rows: int, num_tokens: int) -> tuple[FlatBatch, np.ndarray]:
    """New tokens of each row after its context, and the index of the logits that are wanted: all."""
    slots = np.repeat(np.arange(num_rows), num_tokens)
    positions = np.tile(context + np.arange(num_tokens), num_rows)
    return FlatBatch(1 + np.arange(len(slots)) % 100, slots, positions), np.arange(len(slots))


def pass_s(bench: Bench, runner: ModelRunner, context: int, num_rows: int, num_tokens: int) -> float:
    batch, wanted = batch_of(context, num_rows, num_tokens)
    times = TINY_NUM_TIMES if bench.is_fake else NUM_TIMES
    return bench.host_s(lambda: runner.forward(batch, wanted), times)


def bytes_beside_allocator(bench: Bench) -> int:
    """Used on the device, by whomever, without what torch's allocator has taken."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(bench.device)
    held = 0 if bench.is_fake else torch.cuda.memory_reserved(bench.device)
    return total - free - held


if __name__ == "__main__":
    sys.exit(main())
