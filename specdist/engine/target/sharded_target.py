"""The target on several tensor-parallel ranks: rank 0 announces each pass, all ranks run it, rank 0 verifies.

N tokens whose logits are wanted, P of prompts, v token ids of one rank's part of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from specdist.engine.interfaces import PromptTokens, VerifyInput, VerifyOutput
from specdist.engine.messages.packing import pack, unpack
from specdist.engine.messages.wire import wire_broadcast
from specdist.engine.target.collectives import RANK_ZERO, Collectives
from specdist.engine.target.opened import OpenedSequences
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.engine.target.vocab_parallel import VocabParallelVerifier
from specdist.engine.times.reports import Traffic
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.vocab_parallel import vocab_ranges

# Most arrays that ask for log-probabilities: indices of logits, and token ids. A pass has more.
SCORED_TOKENS = 2
# From the ids of a rank's slice and whether it is rank 0; None where nothing is processed.
NewPipeline = Callable[[range, bool], LogitsPipeline | None]


def no_pipeline(ids: range, is_rank0: bool) -> None:
    """Nothing is processed."""
    del ids, is_rank0


@dataclass(frozen=True, kw_only=True)
class TargetPass:
    """Rank 0 → the other ranks of the target."""

    page_updates: PageUpdates
    verify_input: VerifyInput


@dataclass(frozen=True, kw_only=True)
class OpeningPass(TargetPass):
    """Where logits are processed: what every rank knows of the rows."""

    opened: OpenedSequences


@dataclass(frozen=True, kw_only=True)
class ScoringPass(OpeningPass):
    """Where prompts are scored: which of their tokens."""

    prompt_indices_P: np.ndarray
    prompt_ids_P: np.ndarray


def pass_type(settings: SamplingSettings) -> type[TargetPass]:
    """What is sent in a run with these settings."""
    if settings.num_prompt_logprobs is not None:
        return ScoringPass
    return TargetPass if settings.processing is None else OpeningPass


class ShardedTarget:
    """The target's rank 0: announces each pass to the other ranks, runs it with them, and verifies alone."""

    is_single_rank = False

    def __init__(
        self,
        runner: ModelRunner,
        group: dist.ProcessGroup,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        new_pipeline: NewPipeline = no_pipeline,
    ) -> None:
        self._runner = runner
        self._passes = wire_broadcast(RANK_ZERO, group)
        self._collectives = Collectives(group)
        self._verifier = _verifier(self._collectives, settings, vocab_size, new_pipeline)
        self._verifier.tell = self._passes.send
        self._pass_type = pass_type(settings)
        self.device = runner.device

    @property
    def traffic(self) -> Traffic:
        num_copies = self._collectives.size - 1
        announced = Traffic(self._passes.num_messages, self._passes.num_bytes * num_copies)
        return announced + Traffic(self._collectives.num_calls, self._collectives.num_bytes)

    def forward(self, updates: PageUpdates, verify_input: VerifyInput) -> VerifyOutput:
        self._passes.send(pack(_announced(self._pass_type, updates, verify_input)))
        logits_Rv = _run(self._runner, updates, verify_input)
        verify_output = self._verifier.verify(logits_Rv, verify_input)
        assert verify_output is not None
        return verify_output

    def close(self) -> None:
        self._passes.send([])


def target_worker_loop(
    runner: ModelRunner,
    group: dist.ProcessGroup,
    *,
    settings: SamplingSettings,
    vocab_size: int,
    new_pipeline: NewPipeline = no_pipeline,
) -> None:
    """The loop of the target's other ranks: run every pass that rank 0 announces and send it what it needs of
    the logits, until it closes."""
    passes = wire_broadcast(RANK_ZERO, group)
    verifier = _verifier(Collectives(group), settings, vocab_size, new_pipeline)
    while arrays := passes.receive():
        if len(arrays) <= SCORED_TOKENS:
            verifier.serve_scores(arrays)
            continue
        target_pass = unpack(pass_type(settings), arrays)
        verify_input = _as_announced(target_pass)
        verifier.verify(_run(runner, target_pass.page_updates, verify_input), verify_input)
        verifier.serve_next_distributions()


def _verifier(
    collectives: Collectives, settings: SamplingSettings, vocab_size: int, new_pipeline: NewPipeline
) -> VocabParallelVerifier:
    ids = vocab_ranges(vocab_size, collectives.size)[collectives.rank]
    pipeline = new_pipeline(ids, collectives.rank == RANK_ZERO)
    return VocabParallelVerifier(collectives, settings=settings, vocab_size=vocab_size, pipeline=pipeline)


def _announced(kind: type[TargetPass], updates: PageUpdates, verify_input: VerifyInput) -> TargetPass:
    more: dict[str, Any] = {}
    if issubclass(kind, OpeningPass):
        more["opened"] = verify_input.opened
    if issubclass(kind, ScoringPass):
        more["prompt_indices_P"] = verify_input.prompts.indices_P
        more["prompt_ids_P"] = verify_input.prompts.token_ids_P
    return kind(page_updates=updates, verify_input=verify_input, **more)


def _as_announced(target_pass: TargetPass) -> VerifyInput:
    verify_input = target_pass.verify_input
    if isinstance(target_pass, OpeningPass):
        verify_input = dataclasses.replace(verify_input, opened=target_pass.opened)
    if isinstance(target_pass, ScoringPass):
        prompts = PromptTokens(target_pass.prompt_indices_P, target_pass.prompt_ids_P)
        verify_input = dataclasses.replace(verify_input, prompts=prompts)
    return verify_input


def _run(runner: ModelRunner, updates: PageUpdates, verify_input: VerifyInput) -> Tensor:
    """Logits [N + P, v] of this rank's part of the vocabulary, until the next pass."""
    runner.reuses_logits = True
    runner.update_pages(updates)
    return runner.forward(verify_input.batch, verify_input.run_indices)
