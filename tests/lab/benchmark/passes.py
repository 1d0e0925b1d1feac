"""Single passes over rows of equal length: specdist's, transformers' own, and lower bounds of their times.

A lower bound is the time of a pass's bytes at the memory's rate, or of its operations at the arithmetic rate,
whichever is longer. Both rates are measured on this device, with simple kernels. Weights are assumed to be
read at the rate at which an array of their size can be read repeatedly: what stays in a cache does so for the
model too.

B rows, C context tokens, N new tokens per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from specdist.engine.times.timeline import timed
from specdist.lab.benchmark.pair import PagedPair
from specdist.models.batch.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner
from specdist.models.quantized.quantized import quantization_of
from specdist.models.sizes.sizes import model_size
from specdist.utils.packages import cache_argument
from tests.lab.draft_rank import with_slots

NUM_WARMUPS = 2
NUM_TRIALS = 12
ROW_LENGTH = 1024
# More than any cache holds, and less than a device with a model on it has free.
MOST_BYTES = 2**30
MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}


def in_turn(actions: Sequence[Callable[[], float | tuple[float, float]]], num_repeats: int) -> np.ndarray:
    """float64 [actions, repeats, ...]: the seconds that each action returned. They run in turn, so that a
    slow minute of the machine affects all of them; the first calls warm up and are left out."""
    found = [[action() for action in actions] for _ in range(NUM_WARMUPS + num_repeats)]
    return np.array(found[NUM_WARMUPS:]).swapaxes(0, 1)


def random_rows(vocab_size: int, num_rows: int, *lengths: int, seed: int) -> list[Tensor]:
    """Token ids int64 [B, length] for each of the lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (num_rows, length), generator=generator) for length in lengths]


class FlatPass:
    """A pass of specdist, with the planning on the host. Repeating it overwrites the same cache entries."""

    def __init__(self, paged: PagedPair, runner: ModelRunner, context_BC: Tensor, new_BN: Tensor) -> None:
        self._pair = paged.pair
        self._runner = runner
        num_context_tokens, num_new_tokens = context_BC.shape[1], new_BN.shape[1]
        table = with_slots(paged.assembly, len(new_BN)).page_table()
        for slot in range(len(new_BN)):
            table.open(slot, context_BC[slot].tolist())
            table.extend(slot, num_context_tokens + num_new_tokens)
        runner.update_pages(table.drain_updates())
        self._pair.use_specdist_attention()
        runner.forward(_flat(context_BC, first_position=0), [])
        self._batch = _flat(new_BN, first_position=num_context_tokens)

    def run(self) -> Tensor:
        """Logits [B * N, V]."""
        return self._runner.forward(self._batch, np.arange(len(self._batch)))

    def seconds(self) -> float:
        self._pair.use_specdist_attention()
        return timed(self._runner.device, self.run)[0]


class PlainPass:
    """The target's pass in transformers. After it the cache is cut back, outside the measured time."""

    def __init__(self, paged: PagedPair, context_BC: Tensor, new_BN: Tensor) -> None:
        self._pair = paged.pair
        self._cache = DynamicCache()
        self._new_BN = new_BN.to(self._pair.device)
        self._pair.use_transformers_attention()
        self._forward(context_BC.to(self._pair.device))

    def seconds(self) -> float:
        self._pair.use_transformers_attention()
        seconds, _ = timed(self._pair.device, lambda: self._forward(self._new_BN))
        self._cache.crop(-self._new_BN.shape[1])
        return seconds

    def _forward(self, token_ids: Tensor) -> None:
        target = self._pair.target
        target(input_ids=token_ids, use_cache=True, **{cache_argument(target.forward): self._cache})


def _flat(token_ids_BN: Tensor, *, first_position: int) -> FlatBatch:
    """The rows one after the other; slots are row numbers."""
    slots, offsets = np.divmod(np.arange(token_ids_BN.numel()), token_ids_BN.shape[1])
    return FlatBatch(token_ids_BN.ravel().numpy(), slots, first_position + offsets)


@dataclass(frozen=True, kw_only=True)
class FloorResult:
    """One kind of pass: for each row ``num_new_tokens``, all with logits, after ``num_context_tokens``.

    Attributes:
        num_bytes: of weights and of keys and values, each read once.
        num_flop: of matrix products and attention.
        bytes_per_s, flop_per_s: rates of simple kernels on this device, the best of several trials.
        floor_s: the longer of reading and arithmetic at these rates.
        measured_s, best_s: median and shortest pass while the other model rests. On a busy machine the
            shortest is the fairer comparison.
    """

    model: str
    batch_size: int
    num_new_tokens: int
    num_context_tokens: int
    num_bytes: int
    num_flop: int
    bytes_per_s: float
    flop_per_s: float
    floor_s: float
    measured_s: float
    best_s: float

    @property
    def ratio(self) -> float:
        """Of the median to the floor."""
        return self.measured_s / self.floor_s


@torch.inference_mode()
def measure_floors(
    paged: PagedPair,
    *,
    batch_sizes: list[int],
    num_context_tokens: int,
    num_draft_tokens: int,
    num_passes: int,
    seed: int,
) -> list[FloorResult]:
    """The target's verification block and the draft's step, with torch's current number of threads."""
    results = []
    pair = paged.pair
    for name, checkpoint, runner, num_new_tokens in (
        ("target", pair.target_checkpoint, paged.target, num_draft_tokens + 1),
        ("draft", pair.draft_checkpoint, paged.draft, 1),
    ):
        size = model_size(
            name,
            checkpoint.config,
            runner.dtype.itemsize,
            trusts_code=checkpoint.trusts_code,
            quantization=quantization_of(checkpoint),
        )
        weight_bytes = size.streamed_bytes(tp_size=1)
        bytes_per_s = measure_bytes_per_s(min(weight_bytes, MOST_BYTES), runner.dtype, runner.device)
        flop_per_s = measure_flop_per_s(runner.dtype, runner.device)
        for batch_size in batch_sizes:
            rows = random_rows(pair.vocab_size, batch_size, num_context_tokens, num_new_tokens, seed=seed)
            [seconds] = in_turn([FlatPass(paged, runner, *rows).seconds], num_passes)
            num_tokens, num_keys = batch_size * num_new_tokens, num_context_tokens + num_new_tokens
            num_bytes = weight_bytes + round(batch_size * size.cache_read_bytes(1, num_keys))
            num_flop = round(num_tokens * (size.flops_per_token(1) + size.attention_flops(1, num_keys)))
            results.append(
                FloorResult(
                    model=name,
                    batch_size=batch_size,
                    num_new_tokens=num_new_tokens,
                    num_context_tokens=num_context_tokens,
                    num_bytes=num_bytes,
                    num_flop=num_flop,
                    bytes_per_s=bytes_per_s,
                    flop_per_s=flop_per_s,
                    floor_s=max(num_bytes / bytes_per_s, num_flop / flop_per_s),
                    measured_s=float(np.median(seconds)),
                    best_s=float(seconds.min()),
                )
            )
    return results


def measure_bytes_per_s(num_bytes: int, dtype: torch.dtype, device: torch.device) -> float:
    """The best rate at which an array of this size is read: by a sum, or by a product with a vector."""
    num_rows = max(1, num_bytes // (ROW_LENGTH * dtype.itemsize))
    matrix = torch.ones(num_rows, ROW_LENGTH, dtype=dtype, device=device)
    vector = torch.ones(ROW_LENGTH, dtype=dtype, device=device)
    return matrix.nbytes / _best_s(vector[None], matrix, matrix.sum, lambda: matrix @ vector)


def measure_flop_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """The best rate of a large matrix product, in operations per second: two for each multiply-add."""
    size = MATRIX_SIZE[device.type]
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best_s(matrix, matrix)


def _best_s(x: Tensor, weight: Tensor, *others: Callable[[], Tensor]) -> float:
    """Seconds of the fastest kernel: a linear layer, on a CPU by oneDNN too as in a runner, or the others."""
    kernels: list[Callable[[], Tensor]] = [partial(functional.linear, x, weight), *others]
    if x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        kernels.append(partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], ""))
    return min(timed(x.device, kernel)[0] for kernel in kernels for _ in range(NUM_TRIALS))
