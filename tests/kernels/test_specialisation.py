"""What Triton compiles kernels anew for, counted without a GPU: a pass must not wait for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from specdist.kernels import paged_attention
from specdist.models.attention.attention import AttentionCall, AttentionRules
from specdist.models.attention.kernel import TritonKernel
from specdist.models.batch.flat import FlatBatch, ragged_segments
from specdist.utils.ranges import arange_segments

PAGE_SIZE, NUM_SLOTS, MOST_KEYS = 16, 40, 3000
RULES = AttentionRules(None, None, None)
# For segments of at most 8 queries with two heads per key/value head, and for longer ones.
NUM_TILES = 2


class Launches:
    """In place of a kernel: what each launch is specialised on, by Triton's own rules for its arguments."""

    def __init__(self, kernel: Any) -> None:
        # The interpreter's kernel has the function, and what it was decorated with.
        if not isinstance(kernel, jit.JITFunction):
            options = {"do_not_specialize": kernel.kwargs["do_not_specialize"]}
            kernel = jit.JITFunction(kernel.fn, **options)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._rules = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        self.seen: set[str] = set()

    def __getitem__(self, grid: object) -> Any:
        return self._launch

    def _launch(self, *args: Any, **options: Any) -> None:
        _, specialization, _ = self._rules(*args, **options)
        self.seen.add(repr(specialization))


def random_pass(rng: np.random.Generator) -> FlatBatch:
    """Prompt chunks, verification blocks and single steps of some slots."""
    num_segments = int(rng.integers(1, NUM_SLOTS + 1))
    num_new_S = rng.choice([1, 2, 5, 6, 60, 333], num_segments)
    num_keys_S = num_new_S + rng.integers(0, MOST_KEYS - num_new_S)
    return FlatBatch(
        np.zeros(num_new_S.sum(), np.int64),
        np.repeat(rng.permutation(NUM_SLOTS)[:num_segments], num_new_S),
        np.repeat(num_keys_S - num_new_S, num_new_S) + arange_segments(num_new_S),
    )


def test_ragged_passes_compile_attention_once_per_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packed inputs begin, and how wide the table of pages is, differ from pass to pass. With splits as
    programs attention is another kernel, and their join one more; passes of few queries per segment have
    smaller tiles."""
    attend, join = Launches(paged_attention.attend_kernel), Launches(paged_attention.join_kernel)
    monkeypatch.setattr(paged_attention, "attend_kernel", attend)
    monkeypatch.setattr(paged_attention, "join_kernel", join)
    rng = np.random.default_rng(0)
    num_pages = -(-MOST_KEYS // PAGE_SIZE)
    page_table = rng.permutation(NUM_SLOTS * num_pages).reshape(NUM_SLOTS, num_pages)
    key_pages, value_pages = torch.zeros(2, NUM_SLOTS * num_pages, PAGE_SIZE, 2, 16, dtype=torch.bfloat16)
    for _ in range(400):
        batch = random_pass(rng)
        segments, _ = ragged_segments(batch, page_table, PAGE_SIZE, torch.device("cpu"))
        queries = torch.zeros(len(batch), 4, 16, dtype=torch.bfloat16)
        TritonKernel().attend(AttentionCall(queries, key_pages, value_pages, RULES), segments)
    assert (len(attend.seen), len(join.seen)) == (2 * NUM_TILES, NUM_TILES), [*attend.seen, *join.seen]
