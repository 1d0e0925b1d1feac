"""What a target pass is made of, and what it says of every block.

R rows that decode, C candidates of all rows one after the other, K of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from specdist.engine.scheduler import RoundPlan
from specdist.engine.sequence import Sequence
from specdist.engine.tracing import note_block
from specdist.engine.verify import VerifyInput, VerifyOutput
from specdist.models.flat import FlatBatch, arange_segments
from specdist.sampling.acceptance import accepted_flags, num_accepted
from specdist.sampling.random import Purpose, uniforms


@dataclass(frozen=True)
class Block:
    """A row's tokens in the target pass: its next token and the candidates after it."""

    sequence: Sequence
    candidate_ids: list[int]
    features_4K: np.ndarray | None
    num_trusted: int = 0

    @property
    def num_unasked(self) -> int:
        """Leading candidates of which the target is asked nothing: a trace wants to know of all."""
        return self.num_trusted if self.features_4K is None else 0

    def note(self, acceptance_K: np.ndarray | None, *, num_verified: int, num_accepted: int) -> None:
        """Write its candidates into the row's trace, if the run has one."""
        if self.features_4K is not None:
            note_block(
                self.sequence,
                self.candidate_ids,
                self.features_4K,
                acceptance_K=acceptance_K,
                num_trusted=self.num_trusted,
                num_verified=num_verified,
                num_accepted=num_accepted,
            )


@dataclass(frozen=True)
class VerifyResult:
    """How many candidates each block keeps, and with what probability each one asked about is accepted."""

    num_accepted_R: np.ndarray
    acceptance_C: np.ndarray

    def per_block(self, blocks: list[Block]) -> Iterator[tuple[Block, int, np.ndarray]]:
        ends = np.cumsum([len(block.candidate_ids) - block.num_unasked for block in blocks])
        acceptances = np.split(self.acceptance_C, ends)[: len(blocks)]
        return zip(blocks, self.num_accepted_R.tolist(), acceptances, strict=True)


def verify(
    blocks: list[Block],
    num_asked_R: np.ndarray,
    verify_input: VerifyInput,
    verify_output: VerifyOutput,
    draft_probabilities_C: np.ndarray,
) -> VerifyResult:
    """By the rejection rule; trusted candidates are kept whatever it says."""
    unasked_R = np.array([block.num_unasked for block in blocks], np.int64)
    if not num_asked_R.sum():
        return VerifyResult(unasked_R, np.zeros(0))
    num_misses_R = np.array([block.sequence.counters.num_misses for block in blocks], np.int64)
    uniforms_C = uniforms(
        torch.from_numpy(verify_input.stream_keys_N[verify_input.target_logits_indices_C]),
        torch.from_numpy(verify_input.positions_N[verify_input.target_logits_indices_C]),
        torch.from_numpy(np.repeat(num_misses_R, num_asked_R)),
        Purpose.ACCEPT,
    )
    target_C = verify_output.candidate_probabilities()
    flags_C = accepted_flags(target_C, torch.from_numpy(draft_probabilities_C), uniforms_C)
    trusted_R = np.array([block.num_trusted for block in blocks], np.int64) - unasked_R
    flags_C |= torch.from_numpy(arange_segments(num_asked_R) < np.repeat(trusted_R, num_asked_R))
    return VerifyResult(
        unasked_R + num_accepted(flags_C, torch.from_numpy(num_asked_R)).numpy(),
        np.minimum(1.0, target_C.numpy() / draft_probabilities_C),
    )


def context_batch(plan: RoundPlan) -> FlatBatch:
    chunks = plan.chunks
    lengths = np.array([chunk.end - chunk.begin for chunk in chunks], np.int64)
    begins = np.array([chunk.begin for chunk in chunks], np.int64)
    token_ids = [token for chunk in chunks for token in chunk.sequence.token_ids[chunk.begin : chunk.end]]
    return FlatBatch(
        np.array(token_ids, np.int64),
        np.repeat(np.array([chunk.sequence.slot for chunk in chunks], np.int64), lengths),
        np.repeat(begins, lengths) + arange_segments(lengths),
    )


def block_batch(blocks: list[Block], lengths_R: np.ndarray) -> FlatBatch:
    token_ids = [token for block in blocks for token in (block.sequence.token_ids[-1], *block.candidate_ids)]
    firsts = np.array([len(block.sequence.token_ids) - 1 for block in blocks], np.int64)
    return FlatBatch(
        np.array(token_ids, np.int64),
        np.repeat(np.array([block.sequence.slot for block in blocks], np.int64), lengths_R),
        np.repeat(firsts, lengths_R) + arange_segments(lengths_R),
    )
