"""A target whose vocabulary is cut into slices, one per thread, where a job has one per rank.

The slices' own code runs; what crosses between them goes through memory. The ranks' wires have tests of their
own, with real ranks.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specdist.cache.pages import PageUpdates
from specdist.engine.collectives import LEAD_RANK, Collectives
from specdist.engine.proposals import Traffic
from specdist.engine.slices import SlicedVocabulary
from specdist.engine.targets import Target
from specdist.engine.verdicts import Questions, Verdicts
from specdist.models.flat import FlatBatch
from specdist.sampling.distributions import Distributions
from specdist.sampling.slices import vocabulary_slices
from tests.engine.harness import PAGE_SIZE, Harness
from tests.engine.markov import CPU, MarkovModel, MarkovRunner

NUM_SLICES = 2
TIMEOUT_S = 60


class ThreadCollectives:
    """What one thread says to the others; every thread makes the same calls in the same order."""

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[Tensor]) -> None:
        self.rank = rank
        self.size = len(shared)
        self._barrier = barrier
        self._shared = shared

    def gather_everywhere(self, tensor: Tensor) -> Tensor:
        self._shared[self.rank] = tensor
        self._barrier.wait(TIMEOUT_S)
        gathered = torch.stack(self._shared)
        # Nobody writes the next one before all have read this.
        self._barrier.wait(TIMEOUT_S)
        return gathered

    def gather(self, tensor: Tensor) -> Tensor | None:
        gathered = self.gather_everywhere(tensor)
        return gathered if self.rank == LEAD_RANK else None

    def from_lead(self, tensor: Tensor) -> Tensor:
        return self.gather_everywhere(tensor)[LEAD_RANK]


@dataclass(frozen=True)
class _LeadVerdicts:
    """The other threads wait in ``follow_decisions`` until the lead has asked for its decisions."""

    verdicts: Verdicts
    followers: list[Future[None]]

    def candidate_probabilities(self) -> Tensor:
        return self.verdicts.candidate_probabilities()

    def decisions(self, index_W: np.ndarray) -> Distributions:
        decisions = self.verdicts.decisions(index_W)
        for follower in self.followers:
            follower.result(TIMEOUT_S)
        return decisions


class SlicedTarget:
    """Every slice has a runner and a cache of its own."""

    is_alone = True
    device = CPU

    def __init__(self, runners: list[MarkovRunner], vocabularies: list[SlicedVocabulary]) -> None:
        self._runners = runners
        self._vocabularies = vocabularies
        self._pool = ThreadPoolExecutor(len(runners))
        self.traffic = Traffic()

    def forward(self, updates: PageUpdates, batch: FlatBatch, questions: Questions) -> Verdicts:
        logits = []
        for runner in self._runners:
            runner.update_pages(updates)
            logits.append(runner.forward(batch, questions.index_N))

        def follow(vocabulary: SlicedVocabulary, logits_Nv: Tensor) -> None:
            assert vocabulary.judge(logits_Nv, questions) is None or not len(logits_Nv)
            vocabulary.follow_decisions(logits_Nv)

        followers = [
            self._pool.submit(follow, *pair)
            for pair in zip(self._vocabularies[1:], logits[1:], strict=True)
        ]  # fmt: skip
        verdicts = self._vocabularies[0].judge(logits[0], questions)
        assert verdicts is not None
        return _LeadVerdicts(verdicts, followers)

    def close(self) -> None:
        self._pool.shutdown()


class SlicedMarkovReplica(Harness):
    """The Markov pair, with a target in slices; the draft is whole."""

    def __init__(self, target: MarkovModel, draft: MarkovModel, **options: Any) -> None:
        super().__init__(target, draft, **options)
        self._model = target

    def target(self) -> Target:
        barrier, shared = threading.Barrier(NUM_SLICES), [torch.empty(0)] * NUM_SLICES
        runners, vocabularies = [], []
        for rank, ids in enumerate(vocabulary_slices(self.vocab_size, NUM_SLICES)):
            runners.append(MarkovRunner(self._model, ids=ids))
            runners[-1].allocate(
                num_pages=self.num_pages,
                page_size=PAGE_SIZE,
                num_slots=self.scheduling.num_slots,
                max_seq_len=self.max_seq_len,
            )
            collectives = cast(Collectives, ThreadCollectives(rank, barrier, shared))
            vocabularies.append(
                SlicedVocabulary(collectives, settings=self.settings, vocab_size=self.vocab_size)
            )
        return SlicedTarget(runners, vocabularies)
