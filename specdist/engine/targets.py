"""The target as the engine sees it: one process, or rank 0 of several tensor-parallel ranks.

N tokens whose successor is asked for, v ids of a rank's slice of the vocabulary, V all ids.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specdist.cache.pages import PageUpdates
from specdist.engine.collectives import RANK_ZERO, Collectives
from specdist.engine.proposals import Traffic
from specdist.engine.verify import FullDistributions, VerifyInput, VerifyOutput
from specdist.engine.vocab_parallel import VocabParallelVerifier
from specdist.engine.wire import as_ints, wire_broadcast
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner
from specdist.sampling.distributions import SamplingSettings


class Target(Protocol):
    """Runs passes of the target model."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_alone(self) -> bool:
        """No other rank takes part in a pass, so that one which has failed can be repeated."""
        ...

    @property
    def traffic(self) -> Traffic:
        """What has travelled among its ranks so far, DeepSpeed's own sums aside."""
        ...

    def forward(self, updates: PageUpdates, batch: FlatBatch, verify_input: VerifyInput) -> VerifyOutput:
        """Run the batch after the page table's updates, and verify what follows the tokens asked about."""
        ...

    def close(self) -> None:
        """The last pass is over."""
        ...


class LocalTarget:
    """The whole target in this process.

    ``vocab_size``: ids that can be drawn; the logits may be wider by padding.
    """

    is_alone = True

    def __init__(self, runner: ModelRunner, *, settings: SamplingSettings, vocab_size: int) -> None:
        self._runner = runner
        self._settings = settings
        self._vocab_size = vocab_size
        self.device = runner.device
        self.traffic = Traffic()

    def forward(self, updates: PageUpdates, batch: FlatBatch, verify_input: VerifyInput) -> VerifyOutput:
        self._runner.update_pages(updates)
        logits_NV = self._runner.forward(batch, verify_input.index_N)[:, : self._vocab_size]
        return FullDistributions.of(logits_NV, self._settings, verify_input)

    def close(self) -> None:
        """Nothing runs elsewhere."""


class ShardedTarget:
    """The target's rank 0: tells the other ranks what to run, runs it with them, and decides alone."""

    is_alone = False

    def __init__(
        self, runner: ModelRunner, group: dist.ProcessGroup, *, settings: SamplingSettings, vocab_size: int
    ) -> None:
        self._runner = runner
        self._passes = wire_broadcast(RANK_ZERO, group)
        self._collectives = Collectives(group)
        self._vocabulary = VocabParallelVerifier(self._collectives, settings=settings, vocab_size=vocab_size)
        self.device = runner.device

    @property
    def traffic(self) -> Traffic:
        num_copies = self._collectives.size - 1
        announced = Traffic(self._passes.num_messages, self._passes.num_bytes * num_copies)
        return announced + Traffic(self._collectives.num_calls, self._collectives.num_bytes)

    def forward(self, updates: PageUpdates, batch: FlatBatch, verify_input: VerifyInput) -> VerifyOutput:
        self._passes.send(
            [
                updates.slots,
                updates.indices,
                updates.pages,
                np.asarray(batch.token_ids_T),
                batch.slots_T,
                batch.positions_T,
                verify_input.index_N,
                as_ints(verify_input.stream_keys_N),
                verify_input.target_logits_indices_C,
            ]
        )
        verify_output = self._vocabulary.verify(
            _run(self._runner, updates, batch, verify_input), verify_input
        )
        assert verify_output is not None
        return verify_output

    def close(self) -> None:
        self._passes.send([])


def target_worker_loop(
    runner: ModelRunner, group: dist.ProcessGroup, *, settings: SamplingSettings, vocab_size: int
) -> None:
    """What the target's other ranks do: run every pass that rank 0 announces, and give it what it needs of
    their logits, until it closes."""
    passes = wire_broadcast(RANK_ZERO, group)
    vocabulary = VocabParallelVerifier(Collectives(group), settings=settings, vocab_size=vocab_size)
    while arrays := passes.receive():
        slots, indices, pages, token_ids, token_slots, positions, index, stream_keys, judges = arrays
        batch = FlatBatch(
            token_ids.astype(np.int64), token_slots.astype(np.int64), positions.astype(np.int64)
        )
        verify_input = VerifyInput.about(
            batch,
            index_N=index.astype(np.int64),
            stream_keys_N=stream_keys.view(np.int64),
            target_logits_indices_C=judges.astype(np.int64),
        )
        logits_Nv = _run(runner, PageUpdates(slots, indices, pages), batch, verify_input)
        vocabulary.verify(logits_Nv, verify_input)
        vocabulary.serve_next_distributions(logits_Nv)


def _run(runner: ModelRunner, updates: PageUpdates, batch: FlatBatch, verify_input: VerifyInput) -> Tensor:
    """Logits [N, v] of this rank's slice."""
    runner.update_pages(updates)
    return runner.forward(batch, verify_input.index_N)
