"""Blocks: the tokens of sequences in the target pass, and the flat batch that they make with prompt chunks.

R sequences that decode, C candidates of all of them, one after the other, K candidates of one, T flat tokens,
N of them whose logits are wanted, M accepted candidates.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specdist.data.stats.shard import AheadOutcome
from specdist.engine.messages.packing import not_sent
from specdist.engine.messages.proposals import ProposalReply
from specdist.engine.request import FinishReason, Sequence
from specdist.engine.schedule.plan import Chunk
from specdist.engine.target.opened import NOTHING_OPENED, OpenedSequences
from specdist.models.cache.draft_window import DraftWindow
from specdist.models.passes.flat import FlatBatch
from specdist.utils.ranges import places_from, ranges_from


@dataclass(frozen=True, kw_only=True)
class Block:
    """A sequence's tokens in the target pass: its next token, and the candidates after it.

    Attributes:
        features_4K: the candidates' draft features, if the run is traced.
        ahead: the outcome of the work ahead.
        num_trusted: leading candidates that are kept without verification (SPRINTER only).
    """

    sequence: Sequence
    next_token_id: int
    candidate_ids: list[int]
    draft_probabilities_K: np.ndarray
    features_4K: np.ndarray | None
    ahead: AheadOutcome
    num_trusted: int = 0

    @property
    def num_candidates(self) -> int:
        return len(self.candidate_ids)

    @property
    def num_skipped(self) -> int:
        """Leading candidates whose acceptance is not computed: the trusted ones, unless they are traced."""
        return self.num_trusted if self.features_4K is None else 0


class VerifiedBlock(NamedTuple):
    """A block, how many candidates are accepted, and the acceptance probabilities of those not skipped, if
    the run is traced."""

    block: Block
    num_accepted: int
    acceptance_K: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class VerifiedPass:
    """All blocks of a pass, as :class:`VerifiedBlock` each."""

    blocks: list[Block]
    num_accepted_R: np.ndarray
    acceptances: list[np.ndarray] | None = None

    def __iter__(self) -> Iterator[VerifiedBlock]:
        acceptances = itertools.repeat(None) if self.acceptances is None else self.acceptances
        return map(VerifiedBlock, self.blocks, self.num_accepted_R.tolist(), acceptances)

    def parted(self, index: list[int]) -> tuple[Iterable[VerifiedBlock], Iterable[VerifiedBlock]]:
        """The blocks of these indices, and the others."""
        if not index:
            return (), self
        blocks = list(self)
        others = [block for number, block in enumerate(blocks) if number not in index]
        return [blocks[number] for number in index], others


def accepted_tokens(
    verified: VerifiedPass, starts_R: np.ndarray
) -> tuple[list[int], list[int], np.ndarray, np.ndarray]:
    """Of the accepted candidates: the orders of their sequences, positions, indices of logits, and ids."""
    index_M = ranges_from(starts_R, verified.num_accepted_R)
    tokens = [token_id for block in verified for token_id in block.block.candidate_ids[: block.num_accepted]]
    pairs = [(block.block.sequence, block.num_accepted) for block in verified]
    orders = [sequence.order for sequence, count in pairs for _ in range(count)]
    positions = [len(sequence.token_ids) + depth for sequence, count in pairs for depth in range(count)]
    return orders, positions, index_M, np.array(tokens, np.int64)


def blocks_of(
    reply: ProposalReply, sequences: list[Sequence], *, trusts_draft: bool = False
) -> Iterator[Block]:
    """Those of the sequences that decode. ``trusts_draft``: all candidates but the last are trusted."""
    candidate_ids, ends_R = reply.candidate_ids_C.tolist(), np.cumsum(reply.num_drafted_R)
    numbers = zip(ends_R.tolist(), reply.num_drafted_R.tolist(), strict=True)
    outcomes = reply.ahead.outcomes()
    for index, (end, num_drafted) in enumerate(numbers):
        own = slice(end - num_drafted, end)
        yield Block(
            sequence=sequences[index],
            next_token_id=int(reply.next_token_ids_R[index]),
            candidate_ids=candidate_ids[own],
            draft_probabilities_K=reply.draft_probabilities_C[own],
            features_4K=None if reply.traced is None else reply.traced.features_4C[:, own],
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

    ``num_skipped_R``: see :class:`Block`.
    """

    sequences: list[Sequence]
    tails: Tails
    next_token_ids_R: np.ndarray
    candidate_ids_C: np.ndarray
    num_candidates_R: np.ndarray
    num_skipped_R: np.ndarray

    @staticmethod
    def of(
        reply: ProposalReply,
        decoding: list[Sequence],
        tails: Tails,
        ends: list[FinishReason | None],
        *,
        trusts_draft: bool,
    ) -> NewBlocks:
        """Those of the sequences that go on after their next tokens."""
        next_ids_R, ids_C, num_R = reply.next_token_ids_R, reply.candidate_ids_C, reply.num_drafted_R
        if any(ends):
            goes_on_R = np.array([end is None for end in ends])
            decoding, tails = [decoding[index] for index in np.flatnonzero(goes_on_R)], tails[goes_on_R]
            next_ids_R, ids_C, num_R = (
                next_ids_R[goes_on_R],
                ids_C[np.repeat(goes_on_R, num_R)],
                num_R[goes_on_R],
            )
        is_skipping = trusts_draft and reply.traced is None
        return NewBlocks(
            sequences=decoding,
            tails=tails,
            next_token_ids_R=next_ids_R,
            candidate_ids_C=ids_C,
            num_candidates_R=num_R,
            num_skipped_R=np.maximum(num_R - 1, 0) if is_skipping else np.zeros(len(num_R), np.int64),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.sequences) + len(self.candidate_ids_C)


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
    return _joined([batch, *map(_flat_chunk, chunks)]) if chunks else batch


def flat_context(chunks: list[Chunk], window: DraftWindow | None) -> FlatBatch:
    """The tokens of prompt chunks that the draft runs. One with a window has no pages in common with other
    sequences: of a shared prefix it runs what its window has, too, and of a context no more."""
    if window is None:
        return _joined([_NOTHING, *map(_flat_chunk, chunks)]) if chunks else _NOTHING
    found = [_NOTHING]
    for chunk in chunks:
        sequence = chunk.sequence
        is_first = chunk.begin == sequence.num_shared
        whole = _flat_chunk(dataclasses.replace(chunk, begin=0) if is_first else chunk)
        is_run_T = window.is_run(whole.positions_T, sequence.num_prompt_tokens)
        found.append(
            FlatBatch(
                *(
                    np.asarray(each)[is_run_T]
                    for each in (whole.token_ids_T, whole.slots_T, whole.positions_T)
                )
            )
        )
    return _joined(found)


_NOTHING = FlatBatch(*np.zeros((3, 0), np.int64))


def _flat_chunk(chunk: Chunk) -> FlatBatch:
    token_ids = np.array(chunk.sequence.token_ids[chunk.begin : chunk.end], np.int64)
    positions = np.arange(chunk.begin, chunk.end)
    return FlatBatch(token_ids, np.full(len(token_ids), chunk.sequence.slot), positions)


def _joined(batches: list[FlatBatch]) -> FlatBatch:
    return FlatBatch(
        np.concatenate([np.asarray(batch.token_ids_T) for batch in batches]),
        np.concatenate([batch.slots_T for batch in batches]),
        np.concatenate([batch.positions_T for batch in batches]),
    )


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """Tokens of prompts whose log-probabilities are wanted.

    Attributes:
        indices_P: of the tokens before them, among the batch's.
        token_ids_P: what they are.
    """

    indices_P: np.ndarray
    token_ids_P: np.ndarray


NO_PROMPT_TOKENS = PromptTokens(*np.zeros((2, 0), np.int64))


@dataclass(frozen=True, kw_only=True)
class VerifyInput:
    """A pass: the batch, the tokens whose logits are wanted, and the candidates that these logits verify.

    Attributes:
        logits_indices_N: indices of the tokens whose logits are wanted, among the batch's.
        stream_keys_N: random stream of each one's sequence.
        target_logits_indices_C: for every candidate, which of the N logits verifies it: those of the token
            before it.
    """

    batch: FlatBatch
    logits_indices_N: np.ndarray
    stream_keys_N: np.ndarray
    target_logits_indices_C: np.ndarray
    # Sent by themselves, where logits are processed, and where prompts are scored.
    opened: OpenedSequences = not_sent(NOTHING_OPENED)
    prompts: PromptTokens = not_sent(NO_PROMPT_TOKENS)

    @property
    def run_indices(self) -> np.ndarray:
        """Of all tokens whose logits a pass computes, those of prompts last."""
        if not len(self.prompts.indices_P):
            return self.logits_indices_N
        return np.concatenate([self.logits_indices_N, self.prompts.indices_P])

    @property
    def positions_N(self) -> np.ndarray:
        """Positions in their sequences of the tokens that the logits predict."""
        return self.batch.positions_T[self.logits_indices_N] + 1

    @property
    def candidate_ids_C(self) -> np.ndarray:
        """Each candidate follows the token whose logits verify it."""
        index_C = self.logits_indices_N[self.target_logits_indices_C] + 1
        return np.asarray(self.batch.token_ids_T)[index_C]
