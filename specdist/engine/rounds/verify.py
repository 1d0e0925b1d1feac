"""The target's side of a round: one pass over the blocks of sequences and prompt chunks, then the acceptance
of every block.

R sequences that decode, C candidates of all of them, one after the other, K candidates of one, T flat tokens,
N of them whose logits are wanted, W sequences whose next token is to be sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from specdist.data.stats.shard import AheadOutcome
from specdist.engine.messages.interfaces import (
    NO_PROMPT_TOKENS,
    Target,
    VerifyInput,
    VerifyOutput,
)
from specdist.engine.messages.opened import OpenedSequences
from specdist.engine.messages.proposals import NO_TOKENS, ProposalReply
from specdist.engine.request import FinishReason, Sequence
from specdist.engine.rounds.logprobs import LogprobBook
from specdist.engine.schedule.plan import DRAW, Chunk
from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import (
    Dense,
    Distributions,
    acceptance_probabilities,
    accepted,
    count_accepted,
)
from specdist.sampling.random import Purpose, RandomKeys
from specdist.utils.ranges import arange_segments, places_from, ranges_from


@dataclass(frozen=True, kw_only=True)
class Block:
    """A sequence's tokens in the target pass: its next token, and the candidates after it.

    Attributes:
        features_3K: the candidates' draft features, if the run is traced.
        ahead: the outcome of the work ahead.
        num_trusted: leading candidates that are kept without verification (SPRINTER only).
    """

    sequence: Sequence
    next_token_id: int
    candidate_ids: list[int]
    features_3K: np.ndarray | None
    ahead: AheadOutcome
    num_trusted: int = 0

    @property
    def num_candidates(self) -> int:
        return len(self.candidate_ids)


def blocks_of(
    reply: ProposalReply, sequences: list[Sequence], *, trusts_draft: bool = False
) -> Iterator[Block]:
    """The blocks of the sequences that decode. ``trusts_draft``: all candidates but the last are trusted."""
    candidate_ids, ends_R = reply.candidate_ids_C.tolist(), np.cumsum(reply.num_drafted_R)
    numbers = zip(ends_R.tolist(), reply.num_drafted_R.tolist(), strict=True)
    outcomes = reply.ahead.outcomes()
    for index, (end, num_drafted) in enumerate(numbers):
        own = slice(end - num_drafted, end)
        yield Block(
            sequence=sequences[index],
            next_token_id=int(reply.next_token_ids_R[index]),
            candidate_ids=candidate_ids[own],
            features_3K=None if reply.features_3C is None else reply.features_3C[:, own],
            ahead=outcomes[index],
            num_trusted=max(0, num_drafted - 1) if trusts_draft else 0,
        )


@dataclass(frozen=True, eq=False)
class Tails:
    """Where sequences go on: their slots and random streams, and the positions of their next tokens."""

    slots_R: np.ndarray
    stream_keys_R: np.ndarray
    positions_R: np.ndarray

    @staticmethod
    def of(sequences: list[Sequence]) -> Tails:
        numbers = [(each.slot, each.stream_key, len(each.token_ids)) for each in sequences]
        return Tails(*np.array(numbers, np.int64).reshape(-1, 3).T)

    def __getitem__(self, index: np.ndarray) -> Tails:
        return Tails(self.slots_R[index], self.stream_keys_R[index], self.positions_R[index])


@dataclass(frozen=True, kw_only=True)
class NewBlocks:
    """Blocks as arrays, before their next tokens are committed: all that a pass needs of them.

    ``trusts_draft``: all candidates of a block but the last are kept whatever the target says.
    """

    sequences: list[Sequence]
    tails: Tails
    next_token_ids_R: np.ndarray
    candidate_ids_C: np.ndarray
    draft_probabilities_C: np.ndarray
    num_candidates_R: np.ndarray
    trusts_draft: bool
    is_traced: bool

    @staticmethod
    def of(
        reply: ProposalReply,
        decoding: list[Sequence],
        tails: Tails,
        ends: list[FinishReason | None],
        *,
        trusts_draft: bool,
    ) -> NewBlocks:
        """The blocks of the sequences that continue after their next tokens."""
        next_ids_R, num_R = reply.next_token_ids_R, reply.num_drafted_R
        ids_C, draft_C = reply.candidate_ids_C, reply.draft_probabilities_C
        if any(ends):
            goes_on_R = np.array([end is None for end in ends])
            goes_on_C = np.repeat(goes_on_R, num_R)
            decoding, tails = [decoding[index] for index in np.flatnonzero(goes_on_R)], tails[goes_on_R]
            next_ids_R, num_R = next_ids_R[goes_on_R], num_R[goes_on_R]
            ids_C, draft_C = ids_C[goes_on_C], draft_C[goes_on_C]
        return NewBlocks(
            sequences=decoding,
            tails=tails,
            next_token_ids_R=next_ids_R,
            candidate_ids_C=ids_C,
            draft_probabilities_C=draft_C,
            num_candidates_R=num_R,
            trusts_draft=trusts_draft,
            is_traced=reply.features_3C is not None,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.sequences) + len(self.candidate_ids_C)


@dataclass(frozen=True)
class Verified:
    """What a pass says of R blocks: how many candidates of each are accepted, and if the run is traced, the
    acceptance probabilities [K], block by block."""

    num_accepted_R: np.ndarray
    acceptances: list[np.ndarray] | None = None


def flat_batch(blocks: NewBlocks, chunks: list[Chunk]) -> FlatBatch:
    """The tokens of blocks, which follow what their sequences have committed, and of prompt chunks."""
    lengths_R = blocks.num_candidates_R + 1
    # Each next token stands before as many candidates as its block has.
    begins_R = lengths_R.cumsum() - lengths_R
    is_candidate_T = np.ones(blocks.num_tokens, bool)
    is_candidate_T[begins_R] = False
    token_ids_T = np.empty(len(is_candidate_T), np.int64)
    token_ids_T[begins_R], token_ids_T[is_candidate_T] = blocks.next_token_ids_R, blocks.candidate_ids_C
    places = places_from(blocks.tails.slots_R, blocks.tails.positions_R, lengths_R)
    batch = FlatBatch(token_ids_T, *places)
    if not chunks:
        return batch
    return FlatBatch.joined([batch, *(_flat_chunk(chunk, chunk.begin) for chunk in chunks)])


def flat_context(chunks: list[Chunk], *, keeps_states: bool = False) -> FlatBatch:
    """The tokens of prompt chunks that the draft runs. One that ``keeps_states`` shares nothing among
    sequences: it runs prefixes, too."""
    found = []
    for chunk in chunks:
        is_whole = keeps_states and chunk.begin == chunk.sequence.num_shared
        found.append(_flat_chunk(chunk, 0 if is_whole else chunk.begin))
    return FlatBatch.joined(found) if chunks else NO_TOKENS


def _flat_chunk(chunk: Chunk, begin: int) -> FlatBatch:
    token_ids = np.array(chunk.sequence.token_ids[begin : chunk.end], np.int64)
    return FlatBatch(token_ids, np.full(len(token_ids), chunk.sequence.slot), np.arange(begin, chunk.end))


class Verifier:
    """Runs the target's passes, and keeps the distributions from which the next tokens are sampled."""

    def __init__(self, target: Target, book: LogprobBook | None = None) -> None:
        """``book``: notes the log-probabilities of emitted tokens."""
        self._target = target
        self._book = book
        self._next_distributions: Distributions | None = None
        # Whose next tokens these are.
        self._next_sequences: list[Sequence] = []

    def next_distributions(self, sequences: list[Sequence], next_token_ids_R: np.ndarray) -> Dense | None:
        """The target's distributions [W] after the tokens that the last pass has accepted, for the sequences
        whose next token is ``DRAW``, once. One-hot ones become these, in place; then there are none."""
        found, self._next_distributions = self._next_distributions, None
        drawn = [sequence for sequence in sequences if sequence.forced_next_token is None]
        if not drawn:
            return None
        assert found is not None
        if drawn != self._next_sequences:
            index_of = {sequence.order: index for index, sequence in enumerate(self._next_sequences)}
            found = found.select(np.array([index_of[sequence.order] for sequence in drawn], np.int64))
        if isinstance(found, Dense):
            return found
        next_token_ids_R[next_token_ids_R == DRAW] = found.token_ids_N.cpu().numpy()
        return None

    def verify(
        self, page_updates: PageUpdates, blocks: NewBlocks, chunks: list[Chunk], opened: OpenedSequences
    ) -> Callable[[], Verified]:
        """Begin one target pass over the blocks and the prompt chunks. What is returned waits for it, and is
        to be called once the blocks' next tokens are committed."""
        # Logits are wanted of all tokens of a block, and of the last token of a context that is complete.
        lengths_R, stream_keys = blocks.num_candidates_R + 1, blocks.tails.stream_keys_R
        num_block_logits = blocks.num_tokens
        logits_indices_N = np.arange(num_block_logits)
        complete = [chunk.sequence for chunk in chunks if chunk.completes_context]
        if complete:
            chunk_ends = blocks.num_tokens + np.cumsum([chunk.end - chunk.begin for chunk in chunks])
            is_complete = [chunk.completes_context for chunk in chunks]
            logits_indices_N = np.r_[logits_indices_N, chunk_ends[is_complete] - 1]
            stream_keys = np.r_[stream_keys, [sequence.stream_key for sequence in complete]]
        num_keys = np.r_[lengths_R, np.ones(len(complete), np.int64)] if complete else lengths_R
        starts_R = lengths_R.cumsum() - lengths_R
        verify_input = VerifyInput(
            batch=flat_batch(blocks, chunks),
            logits_indices_N=logits_indices_N,
            stream_keys_N=stream_keys.repeat(num_keys),
            # All logits of a block but the last verify the candidate after their token.
            target_logits_indices_C=ranges_from(starts_R, blocks.num_candidates_R),
            opened=opened,
            prompts=self._book.prompt_tokens(chunks, blocks.num_tokens) if self._book else NO_PROMPT_TOKENS,
        )
        verify_output = self._target.forward(page_updates, verify_input)
        self._next_sequences = blocks.sequences + complete

        def verified_blocks() -> Verified:
            verified = _verify_blocks(blocks, verify_input, verify_output)
            num_accepted_R = verified.num_accepted_R
            index_W = starts_R + num_accepted_R
            if complete:
                index_W = np.r_[index_W, num_block_logits + np.arange(len(complete))]
            self._next_distributions = verify_output.next_distributions(index_W) if len(index_W) else None
            if self._book is not None:
                scores, batch, sequences = verify_output.scores, verify_input.batch, self._next_sequences
                self._book.note(scores, batch, sequences, starts_R, num_accepted_R, index_W)
            return verified

        return verified_blocks


def _verify_blocks(blocks: NewBlocks, verify_input: VerifyInput, verify_output: VerifyOutput) -> Verified:
    """Verify by the rejection rule; trusted candidates are kept whatever it says. What needs no result of the
    pass is done before the first one is asked for, which waits."""
    num_R, index_C = blocks.num_candidates_R, verify_input.target_logits_indices_C
    if not len(index_C):
        return Verified(num_R)
    num_misses_R = np.array([sequence.counters.num_misses for sequence in blocks.sequences], np.int64)
    keys_C = RandomKeys(
        stream_keys_N=verify_input.stream_keys_N[index_C],
        positions_N=verify_input.positions_N[index_C],
        num_misses_N=num_misses_R.repeat(num_R),
    )
    uniforms_C = keys_C.uniforms(Purpose.ACCEPT).numpy()
    draft_C = blocks.draft_probabilities_C
    target_C = verify_output.candidate_probabilities()
    accepted_C = accepted(target_C, draft_C, uniforms_C)
    if blocks.trusts_draft:
        accepted_C |= arange_segments(num_R) < num_R.repeat(num_R) - 1
    num_accepted_R = count_accepted(accepted_C, num_R)
    acceptances = None
    if blocks.is_traced:
        acceptance_C = acceptance_probabilities(target_C, draft_C)
        acceptances = np.split(acceptance_C, np.cumsum(num_R))[: len(num_R)]
    return Verified(num_accepted_R, acceptances)
