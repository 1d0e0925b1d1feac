"""The target on several tensor-parallel ranks: rank 0 announces each pass, all ranks run it, rank 0 verifies.

N tokens whose logits are wanted, P of prompts, v token ids of one rank's part of the vocabulary.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from specdist.engine.interfaces import VerifyInput, VerifyOutput
from specdist.engine.messages.codec import packed_pass, unpacked_pass
from specdist.engine.messages.link import broadcast_link
from specdist.engine.target.collectives import RANK_ZERO
from specdist.engine.target.vocab_parallel import VocabParallelVerifier
from specdist.engine.times.reports import Traffic
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.runner import ModelRunner

# Most arrays that ask for log-probabilities: indices of logits, and token ids. A pass has more.
SCORED_TOKENS = 2


class ShardedTarget:
    """The target's rank 0: announces each pass to the other ranks, runs it with them, and verifies alone."""

    is_single_rank = False

    def __init__(
        self, runner: ModelRunner, group: dist.ProcessGroup, verifier: VocabParallelVerifier
    ) -> None:
        self._runner = runner
        self._passes = broadcast_link(RANK_ZERO, group)
        self._verifier = verifier
        verifier.tell = self._passes.send
        self.device = runner.device

    @property
    def traffic(self) -> Traffic:
        collectives = self._verifier.collectives
        num_copies = collectives.size - 1
        announced = Traffic(self._passes.num_messages, self._passes.num_bytes * num_copies)
        return announced + Traffic(collectives.num_calls, collectives.num_bytes)

    def forward(self, updates: PageUpdates, verify_input: VerifyInput) -> VerifyOutput:
        self._passes.send(packed_pass(updates, verify_input, has_rows=self._verifier.is_processing))
        logits_Rv = _run(self._runner, updates, verify_input)
        verify_output = self._verifier.verify(logits_Rv, verify_input)
        assert verify_output is not None
        return verify_output

    def close(self) -> None:
        self._passes.send([])


def target_worker_loop(
    runner: ModelRunner, group: dist.ProcessGroup, verifier: VocabParallelVerifier
) -> None:
    """The loop of the target's other ranks: run every pass that rank 0 announces and send it what it needs of
    the logits, until it closes."""
    passes = broadcast_link(RANK_ZERO, group)
    while arrays := passes.receive():
        if len(arrays) <= SCORED_TOKENS:
            verifier.serve_scores(arrays)
            continue
        updates, verify_input = unpacked_pass(arrays)
        verifier.verify(_run(runner, updates, verify_input), verify_input)
        verifier.serve_next_distributions()


def _run(runner: ModelRunner, updates: PageUpdates, verify_input: VerifyInput) -> Tensor:
    """Logits [N + P, v] of this rank's part of the vocabulary, until the next pass."""
    runner.reuses_logits = True
    runner.update_pages(updates)
    return runner.forward(verify_input.batch, verify_input.run_indices)
