"""Verification: one target pass over all blocks and prompt chunks, then the rejection rule for every
candidate.

A *block* is a sequence's next token followed by its candidates. The logits of each token verify the candidate
after it; those of the last accepted token are what the following next token is sampled from, in the next
round.

R sequences that decode, C candidates of all of them, one after the other, K candidates of one block, T flat
tokens, N tokens whose logits are wanted, W sequences whose next token is to be sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specdist.cache.pages import PageUpdates
from specdist.engine.scheduler import Chunk
from specdist.engine.sequence import Sequence
from specdist.engine.target import Target, VerifyInput, VerifyOutput
from specdist.engine.tracing import record_block
from specdist.models.flat import FlatBatch
from specdist.sampling.distributions import Distributions
from specdist.sampling.random import RandomKeys
from specdist.sampling.rejection_sampler import acceptance_probabilities, count_accepted, verify_candidates
from specdist.utils.ranges import arange_segments


@dataclass(frozen=True, kw_only=True)
class Block:
    """A sequence's tokens in the target pass: its next token, committed already, and the candidates after it.

    ``features_4K``: the candidates' draft features, if the run is traced. ``num_trusted``: leading candidates
    that are kept without verification (SPRINTER only).
    """

    sequence: Sequence
    candidate_ids: list[int]
    draft_probabilities_K: np.ndarray
    features_4K: np.ndarray | None = None
    num_trusted: int = 0

    @property
    def num_candidates(self) -> int:
        return len(self.candidate_ids)

    @property
    def num_skipped(self) -> int:
        """Leading candidates whose acceptance is not computed: the trusted ones, unless a trace records
        them."""
        return self.num_trusted if self.features_4K is None else 0

    def trace(self, acceptance_K: np.ndarray | None, *, num_verified: int, num_accepted: int) -> None:
        """Add the candidates to the sequence's trace, if the run is traced."""
        if self.features_4K is not None:
            record_block(
                self.sequence,
                self.candidate_ids,
                self.features_4K,
                acceptance_K=acceptance_K,
                num_trusted=self.num_trusted,
                num_verified=num_verified,
                num_accepted=num_accepted,
            )


@dataclass(frozen=True)
class VerifiedBlock:
    """A block, how many of its candidates are accepted, and the acceptance probability of each one that was
    not skipped."""

    block: Block
    num_accepted: int
    acceptance_K: np.ndarray


class Verifier:
    """Runs the target's passes, and keeps the distributions from which the next tokens are sampled."""

    def __init__(self, target: Target, num_slots: int) -> None:
        self._target = target
        self._stream_keys = np.zeros(num_slots, np.int64)
        self._next_distributions: Distributions | None = None
        # By the sequences' order of admission.
        self._next_index_of: dict[int, int] = {}

    def open(self, sequences: list[Sequence]) -> None:
        """These sequences have been given a slot."""
        for sequence in sequences:
            self._stream_keys[sequence.slot] = sequence.stream_key

    def next_distributions(self, sequences: list[Sequence]) -> Distributions:
        """The target's distributions [W] after the tokens that the last pass has accepted."""
        assert self._next_distributions is not None
        index_W = torch.tensor([self._next_index_of[sequence.order] for sequence in sequences])
        return self._next_distributions.select(index_W.to(self._next_distributions.device))

    def verify(
        self, page_updates: PageUpdates, blocks: list[Block], chunks: list[Chunk], context: FlatBatch
    ) -> list[VerifiedBlock]:
        """One target pass over the blocks and the prompt chunks, whose tokens are ``context``."""
        lengths_R = np.array([block.num_candidates + 1 for block in blocks], np.int64)
        decoded = block_batch(blocks, lengths_R)
        batch = FlatBatch(
            np.concatenate([decoded.token_ids_T, context.token_ids_T]),
            np.concatenate([decoded.slots_T, context.slots_T]),
            np.concatenate([decoded.positions_T, context.positions_T]),
        )
        # Logits are wanted of a block's tokens, except of those before skipped candidates, and of the last
        # token of a context that is complete.
        num_skipped_R = np.array([block.num_skipped for block in blocks], np.int64)
        num_logits_R = lengths_R - num_skipped_R
        block_logits_N = np.repeat(np.cumsum(lengths_R) - num_logits_R, num_logits_R)
        block_logits_N += arange_segments(num_logits_R)
        complete = [chunk for chunk in chunks if chunk.completes_context]
        is_complete = np.array([chunk.completes_context for chunk in chunks], bool)
        chunk_ends = len(decoded) + np.cumsum([chunk.end - chunk.begin for chunk in chunks])
        logits_indices_N = np.r_[block_logits_N, chunk_ends[is_complete] - 1].astype(np.int64)
        starts_R = np.cumsum(num_logits_R) - num_logits_R
        verify_input = VerifyInput.of_batch(
            batch,
            logits_indices_N=logits_indices_N,
            stream_keys_N=self._stream_keys[batch.slots_T[logits_indices_N]],
            # All logits of a block but the last verify the candidate after their token.
            target_logits_indices_C=np.repeat(starts_R, num_logits_R - 1) + arange_segments(num_logits_R - 1),
        )
        verify_output = self._target.forward(page_updates, batch, verify_input)
        verified = _verify_blocks(blocks, num_logits_R - 1, verify_input, verify_output)
        num_accepted_R = np.array([block.num_accepted for block in verified], np.int64)
        index_W = np.r_[
            starts_R + num_accepted_R - num_skipped_R, len(block_logits_N) + np.arange(len(complete))
        ].astype(np.int64)
        self._next_distributions = verify_output.next_distributions(index_W) if len(index_W) else None
        sequences = [block.sequence for block in blocks] + [chunk.sequence for chunk in complete]
        self._next_index_of = {sequence.order: index for index, sequence in enumerate(sequences)}
        return verified


def _verify_blocks(
    blocks: list[Block], num_verified_R: np.ndarray, verify_input: VerifyInput, verify_output: VerifyOutput
) -> list[VerifiedBlock]:
    """By the rejection rule; trusted candidates are kept whatever it says."""
    if not num_verified_R.sum():
        return [VerifiedBlock(block, block.num_skipped, np.zeros(0)) for block in blocks]
    index_C = verify_input.target_logits_indices_C
    keys_C = RandomKeys(
        stream_keys_N=verify_input.stream_keys_N[index_C],
        positions_N=verify_input.positions_N[index_C],
        num_misses_N=np.repeat(
            np.array([block.sequence.counters.num_misses for block in blocks], np.int64), num_verified_R
        ),
    )
    target_C = verify_output.candidate_probabilities()
    draft_C = torch.from_numpy(
        np.concatenate([block.draft_probabilities_K[block.num_skipped :] for block in blocks])
    )
    accepted_C = verify_candidates(target_C, draft_C, keys_C)
    trusted_R = np.array([block.num_trusted - block.num_skipped for block in blocks], np.int64)
    accepted_C |= torch.from_numpy(arange_segments(num_verified_R) < np.repeat(trusted_R, num_verified_R))
    num_accepted_R = count_accepted(accepted_C, torch.from_numpy(num_verified_R)).tolist()
    acceptance_C = acceptance_probabilities(target_C, draft_C).numpy()
    acceptances = np.split(acceptance_C, np.cumsum(num_verified_R))[: len(blocks)]
    return [
        VerifiedBlock(block, block.num_skipped + num_accepted, acceptance_K)
        for block, num_accepted, acceptance_K in zip(blocks, num_accepted_R, acceptances, strict=True)
    ]


def context_batch(chunks: list[Chunk]) -> FlatBatch:
    """The prompt chunks' tokens."""
    lengths = np.array([chunk.end - chunk.begin for chunk in chunks], np.int64)
    begins = np.array([chunk.begin for chunk in chunks], np.int64)
    token_ids = [token for chunk in chunks for token in chunk.sequence.token_ids[chunk.begin : chunk.end]]
    return FlatBatch(
        np.array(token_ids, np.int64),
        np.repeat(np.array([chunk.sequence.slot for chunk in chunks], np.int64), lengths),
        np.repeat(begins, lengths) + arange_segments(lengths),
    )


def block_batch(blocks: list[Block], lengths_R: np.ndarray) -> FlatBatch:
    """The blocks' tokens: each block begins with its sequence's last committed token."""
    token_ids = [token for block in blocks for token in (block.sequence.token_ids[-1], *block.candidate_ids)]
    firsts = np.array([len(block.sequence.token_ids) - 1 for block in blocks], np.int64)
    return FlatBatch(
        np.array(token_ids, np.int64),
        np.repeat(np.array([block.sequence.slot for block in blocks], np.int64), lengths_R),
        np.repeat(firsts, lengths_R) + arange_segments(lengths_R),
    )
