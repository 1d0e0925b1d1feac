"""A vocabulary-parallel target with one shard of the vocabulary per thread, where a job has one per rank.

The code of the ranks runs; what they exchange goes through memory. The messages between ranks have
tests of their own, with real ranks.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specdist.engine.messages.interfaces import ScoresTokens, Target, VerifyInput, VerifyOutput
from specdist.engine.target.sharded_target import RANK_ZERO, Collectives, VocabParallelVerifier
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import Distributions
from specdist.sampling.vocab_parallel import vocab_ranges
from tests.engine.harness import Harness
from tests.engine.markov import CPU, MarkovModel, MarkovRunner

NUM_SLICES = 2
TIMEOUT_S = 60


class ThreadCollectives:
    """Collectives between threads; every thread makes the same calls in the same order."""

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[Tensor]) -> None:
        self.rank = rank
        self.size = len(shared)
        self._barrier = barrier
        self._shared = shared

    def gather_everywhere(self, tensor: Tensor) -> Tensor:
        self._shared[self.rank] = tensor
        self._barrier.wait(TIMEOUT_S)
        gathered = torch.stack(self._shared)
        # No thread writes the next value before all have read this one.
        self._barrier.wait(TIMEOUT_S)
        return gathered

    def gather(self, tensor: Tensor) -> Tensor | None:
        gathered = self.gather_everywhere(tensor)
        return gathered if self.rank == RANK_ZERO else None

    def from_rank0(self, tensor: Tensor) -> Tensor:
        return self.gather_everywhere(tensor)[RANK_ZERO]


@dataclass(frozen=True)
class _LeadVerdicts:
    """The other threads wait in ``serve_next_distributions`` until rank 0 has asked for its next tokens."""

    verify_output: VerifyOutput
    followers: list[Future[None]]

    @property
    def scores(self) -> ScoresTokens | None:
        return self.verify_output.scores

    def candidate_probabilities(self) -> np.ndarray:
        return self.verify_output.candidate_probabilities()

    def next_distributions(self, index_W: np.ndarray) -> Distributions:
        next_distributions = self.verify_output.next_distributions(index_W)
        for follower in self.followers:
            follower.result(TIMEOUT_S)
        return next_distributions


class SlicedTarget:
    """Every shard of the vocabulary has a runner and a cache of its own."""

    device = CPU

    def __init__(self, runners: list[MarkovRunner], vocabularies: list[VocabParallelVerifier]) -> None:
        self._runners = runners
        self._vocabularies = vocabularies
        # One thread per rank but the first, so that each serves what it is asked in order, as a rank does.
        self._threads = [ThreadPoolExecutor(1) for _ in runners[1:]]

    def forward(self, updates: PageUpdates, verify_input: VerifyInput) -> VerifyOutput:
        logits = []
        for runner in self._runners:
            runner.update_pages(updates)
            logits.append(runner.forward(verify_input.batch, verify_input.run_indices))

        def follow(vocabulary: VocabParallelVerifier, logits_Nv: Tensor) -> None:
            output = vocabulary.verify(logits_Nv, verify_input)
            assert output is None or not len(verify_input.logits_indices_N)
            vocabulary.serve_next_distributions()

        followers = [
            thread.submit(follow, vocabulary, logits_Nv)
            for thread, vocabulary, logits_Nv in zip(
                self._threads, self._vocabularies[1:], logits[1:], strict=True
            )
        ]
        verify_output = self._vocabularies[0].verify(logits[0], verify_input)
        assert verify_output is not None
        # Rank 0 asks for log-probabilities when the others have done all else.
        self._vocabularies[0].tell = lambda asked: [
            thread.submit(vocabulary.serve_scores, asked)
            for thread, vocabulary in zip(self._threads, self._vocabularies[1:], strict=True)
        ]
        return _LeadVerdicts(verify_output, followers)

    def check(self) -> None:
        """No rank waits for another."""

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


class SlicedMarkovReplica(Harness):
    """The Markov pair with a vocabulary-parallel target; the draft is whole."""

    def __init__(self, target: MarkovModel, draft: MarkovModel, **options: Any) -> None:
        super().__init__(target, draft, **options)
        self._model = target

    def target(self) -> Target:
        barrier, shared = threading.Barrier(NUM_SLICES), [torch.empty(0)] * NUM_SLICES
        runners, vocabularies = [], []
        for rank, ids in enumerate(vocab_ranges(self.vocab_size, NUM_SLICES)):
            runners.append(MarkovRunner(self._model, ids=ids))
            self.assembly.allocate(runners[-1])
            collectives = cast(Collectives, ThreadCollectives(rank, barrier, shared))
            vocabularies.append(
                VocabParallelVerifier(
                    collectives,
                    settings=self.settings,
                    vocab_size=self.vocab_size,
                    pipeline=self.assembly.target_pipeline(runners[-1], ids, rank == RANK_ZERO),
                )
            )
        return SlicedTarget(runners, vocabularies)
