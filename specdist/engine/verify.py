"""The target's side of a round: one pass over all blocks and prompt chunks, then the rejection rule.

A *block* is a sequence's next token followed by its candidates. The logits of each token verify the candidate
after it; those of the last accepted token are what the following next token is sampled from, in the next
round. So of the target's distributions the round needs one probability per candidate, and one whole
distribution per sequence: a ``VerifyOutput`` offers no more, so that no rank has to hold the logits of all
tokens. See local_target.py for a target in this process, and sharded_target.py for several ranks.

R sequences that decode, C candidates of all of them, one after the other, K candidates of one block, T flat
tokens, N tokens whose logits are wanted, W sequences whose next token is to be sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specdist.engine.blocks import (
    NO_PROMPT_TOKENS,
    Block,
    NewBlocks,
    VerifiedPass,
    VerifyInput,
    accepted_tokens,
    flat_batch,
)
from specdist.engine.interfaces import Target, VerifyOutput
from specdist.engine.logprobs import EmittedTokens, LogprobBook, ScoresTokens
from specdist.engine.request import Sequence
from specdist.engine.schedule.plan import Chunk
from specdist.engine.target.opened import OpenedSequences
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import NOT_FINITE, Distributions
from specdist.sampling.random import Purpose, RandomKeys
from specdist.sampling.rejection_sampler import acceptance_probabilities, accepted, count_accepted
from specdist.sampling.uploads import upload
from specdist.utils.ranges import arange_segments, ranges_from


class Verifier:
    """Runs the target's passes, and keeps the distributions from which the next tokens are sampled."""

    def __init__(self, target: Target, book: LogprobBook | None = None) -> None:
        """``book``: notes the log-probabilities of emitted tokens."""
        self._target = target
        self._book = book
        self._scores: ScoresTokens | None = None
        self._next_index_W = np.zeros(0, np.int64)
        self._next_distributions: Distributions | None = None
        # Whose next tokens these are.
        self._next_sequences: list[Sequence] = []

    def next_distributions(self, sequences: list[Sequence]) -> Distributions:
        """The target's distributions [W] after the tokens that the last pass has accepted."""
        assert self._next_distributions is not None
        if sequences == self._next_sequences:
            return self._next_distributions
        index_of = self._next_index_of
        index_W = np.array([index_of[sequence.order] for sequence in sequences], np.int64)
        return self._next_distributions.select(*upload(self._next_distributions.device, index_W))

    @property
    def _next_index_of(self) -> dict[int, int]:
        """By the sequences' order of admission."""
        return {sequence.order: index for index, sequence in enumerate(self._next_sequences)}

    def note_next_tokens(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """What these sequences' next tokens are, before the next pass. That of a resumed sequence was noted
        before it was preempted."""
        if self._book is not None:
            pairs, index_of = zip(sequences, token_ids, strict=True), self._next_index_of
            drawn = [each for each in pairs if each[0].forced_next_token is None and each[1] != NOT_FINITE]
            index = [index_of[sequence.order] for sequence, _ in drawn]
            tokens = EmittedTokens(
                [sequence.order for sequence, _ in drawn],
                [len(sequence.token_ids) for sequence, _ in drawn],
                self._next_index_W[index],
                np.array([token_id for _, token_id in drawn], np.int64),
            )
            self._book.note_next(self._scores, tokens)

    def verify(
        self, page_updates: PageUpdates, new_blocks: NewBlocks, chunks: list[Chunk], opened: OpenedSequences
    ) -> Callable[[list[Block]], VerifiedPass]:
        """Begin one target pass over the blocks and the prompt chunks. What is returned waits for it, and is
        to be given the same blocks once their next tokens are committed."""
        lengths_R = new_blocks.num_candidates_R + 1
        # Logits are wanted of a block's tokens, except of those before skipped candidates, and of the last
        # token of a context that is complete.
        num_skipped_R, stream_keys = new_blocks.num_skipped_R, new_blocks.tails.stream_keys_R
        num_logits_R = lengths_R - num_skipped_R
        logits_indices_N = ranges_from(lengths_R.cumsum() - num_logits_R, num_logits_R)
        num_block_logits = len(logits_indices_N)
        complete = [chunk.sequence for chunk in chunks if chunk.completes_context]
        if complete:
            chunk_ends = new_blocks.num_tokens + np.cumsum([chunk.end - chunk.begin for chunk in chunks])
            is_complete = [chunk.completes_context for chunk in chunks]
            logits_indices_N = np.r_[logits_indices_N, chunk_ends[is_complete] - 1]
            stream_keys = np.r_[stream_keys, [sequence.stream_key for sequence in complete]]
        num_keys = np.r_[num_logits_R, np.ones(len(complete), np.int64)] if complete else num_logits_R
        starts_R = num_logits_R.cumsum() - num_logits_R
        verify_input = VerifyInput(
            batch=flat_batch(new_blocks, chunks),
            logits_indices_N=logits_indices_N,
            stream_keys_N=stream_keys.repeat(num_keys),
            # All logits of a block but the last verify the candidate after their token.
            target_logits_indices_C=ranges_from(starts_R, num_logits_R - 1),
            opened=opened,
            prompts=self._book.prompt_tokens(chunks, lengths_R.sum()) if self._book else NO_PROMPT_TOKENS,
        )
        verify_output = self._target.forward(page_updates, verify_input)
        self._next_sequences = new_blocks.sequences + complete

        def verified_blocks(blocks: list[Block]) -> VerifiedPass:
            verified = _verify_blocks(blocks, num_skipped_R, num_logits_R - 1, verify_input, verify_output)
            num_accepted_R = verified.num_accepted_R
            index_W = starts_R + num_accepted_R - num_skipped_R
            if complete:
                index_W = np.r_[index_W, num_block_logits + np.arange(len(complete))]
            self._next_distributions = verify_output.next_distributions(index_W) if len(index_W) else None
            if self._book is not None:
                self._scores, self._next_index_W = verify_output, index_W
                self._book.note(verify_output, EmittedTokens(*accepted_tokens(verified, starts_R)))
                self._book.note_prompts(verify_output)
            return verified

        return verified_blocks


def _verify_blocks(
    blocks: list[Block],
    num_skipped_R: np.ndarray,
    num_verified_R: np.ndarray,
    verify_input: VerifyInput,
    verify_output: VerifyOutput,
) -> VerifiedPass:
    """By the rejection rule; trusted candidates are kept whatever it says. What needs no result of the pass
    is done before the first one is asked for, which waits."""
    if not len(verify_input.target_logits_indices_C):
        return VerifiedPass(blocks=blocks, num_accepted_R=num_skipped_R)
    index_C = verify_input.target_logits_indices_C
    num_misses_R = np.array([block.sequence.counters.num_misses for block in blocks], np.int64)
    keys_C = RandomKeys(
        stream_keys_N=verify_input.stream_keys_N[index_C],
        positions_N=verify_input.positions_N[index_C],
        num_misses_N=num_misses_R.repeat(num_verified_R),
    )
    uniforms_C = keys_C.uniforms(Purpose.ACCEPT).numpy()
    draft_C = np.concatenate([block.draft_probabilities_K[block.num_skipped :] for block in blocks])
    trusted_R = np.array([block.num_trusted - block.num_skipped for block in blocks], np.int64)
    is_trusted_C = arange_segments(num_verified_R) < trusted_R.repeat(num_verified_R)
    target_C = verify_output.candidate_probabilities()
    accepted_C = accepted(target_C, draft_C, uniforms_C) | is_trusted_C
    num_accepted_R = num_skipped_R + count_accepted(accepted_C, num_verified_R)
    acceptances = None
    if blocks[0].features_4K is not None:
        acceptance_C = acceptance_probabilities(*map(torch.from_numpy, (target_C, draft_C))).numpy()
        acceptances = np.split(acceptance_C, np.cumsum(num_verified_R))[: len(blocks)]
    return VerifiedPass(blocks=blocks, num_accepted_R=num_accepted_R, acceptances=acceptances)
