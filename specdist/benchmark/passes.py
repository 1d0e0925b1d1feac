"""Single passes of a model over rows of equal length: specdist's, and transformers' own to compare with.

B rows, C context tokens, N new tokens per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from specdist.benchmark.drafts import with_slots
from specdist.benchmark.pair import PagedPair
from specdist.engine.device_clock import timed
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner

NUM_WARMUPS = 2


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
        self._pair.target(input_ids=token_ids, past_key_values=self._cache, use_cache=True)


def _flat(token_ids_BN: Tensor, *, first_position: int) -> FlatBatch:
    """The rows one after the other; slots are row numbers."""
    slots, offsets = np.divmod(np.arange(token_ids_BN.numel()), token_ids_BN.shape[1])
    return FlatBatch(token_ids_BN.ravel().numpy(), slots, first_position + offsets)
