"""The messages between the target's side and the draft's side, one of each per round.

R sequences that decode, W of them whose next token is sampled from the target's distribution, C candidates of
all sequences, one after the other, T context tokens, P passes of the draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np

from specdist.cache.pages import PageUpdates
from specdist.engine.packing import BoolArray, Float32Array, Int64Array, Packed, not_sent
from specdist.engine.sequence import Sequence
from specdist.engine.timeline import Timeline
from specdist.models.flat import FlatBatch
from specdist.policies import NUM_FEATURES
from specdist.sampling.distributions import Distributions
from specdist.stats.shard import AheadOutcome

# In a token id's place: to be sampled.
DRAW = -1
NO_CONTEXT = -1


@dataclass(frozen=True, kw_only=True)
class DraftAhead:
    """What the draft does during a target pass: ``num_tokens`` tokens after each sequence's candidates, of
    which the first stands in the place of the next token, and ``num_branches`` branches per sequence. With 0
    tokens it waits."""

    num_tokens: int = 0
    num_branches: int = 0


@dataclass(frozen=True, kw_only=True)
class OpenedSequences:
    """Sequences admitted since the last request.

    Attributes:
        slots, stream_keys: where they run, and their random streams.
        num_misses: how often a chain of theirs has been dropped.
        context_lengths: length of the context after which to draft ahead; ``NO_CONTEXT`` for a resumed
            sequence.
        max_lengths: most tokens that each may have.
    """

    slots: np.ndarray
    stream_keys: Int64Array
    num_misses: np.ndarray
    context_lengths: np.ndarray
    max_lengths: np.ndarray

    @staticmethod
    def of(sequences: list[Sequence]) -> OpenedSequences:
        return OpenedSequences(
            slots=np.array([sequence.slot for sequence in sequences], np.int64),
            stream_keys=np.array([sequence.stream_key for sequence in sequences], np.int64),
            num_misses=np.array([sequence.counters.num_misses for sequence in sequences], np.int64),
            context_lengths=np.array(
                [NO_CONTEXT if sequence.is_resumed else sequence.context_length for sequence in sequences],
                np.int64,
            ),
            max_lengths=np.array([sequence.max_length for sequence in sequences], np.int64),
        )


@dataclass(frozen=True, kw_only=True)
class ProposalRequest:
    """Target → draft.

    Attributes:
        slots_R, num_accepted_R: how many candidates of its last block each sequence keeps.
        next_token_ids_R: the token after them where it is known (one-hot distributions, or a resumed
            sequence), else ``DRAW``.
        draft_now_R: most candidates to draft before the reply, beyond those drafted ahead. When the draft
            works ahead, this is 0 except for resumed sequences.
        next_distributions_W: the target's distributions for the ``DRAW`` sequences, in order.
        suspended_slots: of sequences that were preempted and will be opened again; a slot may have a new
            sequence already.
        opened, context: sequences that begin, and the context tokens of this round's target pass, which the
            draft runs too, after its reply.
    """

    page_updates: PageUpdates
    slots_R: np.ndarray
    num_accepted_R: np.ndarray
    next_token_ids_R: np.ndarray
    draft_now_R: np.ndarray
    suspended_slots: np.ndarray
    opened: OpenedSequences
    context: FlatBatch
    # A tensor, sent separately.
    next_distributions_W: Distributions | None = not_sent()


@dataclass(frozen=True)
class RoleTimes:
    """Nanoseconds that the draft's side has spent since its last reply, and its peak memory."""

    prefill: int = 0
    draft: int = 0
    transfer: int = 0
    idle: int = 0
    peak_memory_bytes: int = 0


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes sent, between the target's rank 0 and the draft or among the target's ranks."""

    num_messages: int = 0
    num_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.num_messages + other.num_messages, self.num_bytes + other.num_bytes)

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.num_messages - earlier.num_messages, self.num_bytes - earlier.num_bytes)


Features = Annotated[np.ndarray, Packed(np.float32, np.float64, num_rows=NUM_FEATURES)]


@dataclass(frozen=True, kw_only=True)
class TracedDrafts:
    """What a trace records of drafted tokens. Features are NaN where no pass has given the estimate yet.

    Attributes:
        features_4C: of the candidates of this reply.
        is_verified_R, is_hit_R: whether a token had been drafted ahead in the place of the next token and was
            verified, and whether it was accepted.
        token_ids_R, features_4R, acceptance_R: of that token; the probability with which it is accepted.
    """

    features_4C: Features
    is_verified_R: BoolArray
    is_hit_R: BoolArray
    token_ids_R: np.ndarray
    features_4R: Features
    acceptance_R: Float32Array


@dataclass(frozen=True, kw_only=True)
class AheadReport:
    """The outcome of the work ahead, for every sequence that decodes.

    Attributes:
        num_tokens_R: tokens that had been drafted ahead.
        is_hit_R: the first of them is the next token and the others are the candidates; else they are
            dropped.
        num_branches_R, num_branch_tokens_R: branches that had been prepared, and their tokens.
        branch_ranks_R: rank (from 1) of the alternative whose branch has become the candidates; 0 if none
            has.
    """

    num_tokens_R: np.ndarray
    is_hit_R: BoolArray
    num_branches_R: np.ndarray
    num_branch_tokens_R: np.ndarray
    branch_ranks_R: np.ndarray

    @staticmethod
    def nothing(num_seqs: int) -> AheadReport:
        """Of a draft that did not work ahead."""
        none_R = np.zeros(num_seqs, np.int64)
        return AheadReport(
            num_tokens_R=none_R,
            is_hit_R=none_R.astype(bool),
            num_branches_R=none_R,
            num_branch_tokens_R=none_R,
            branch_ranks_R=none_R,
        )


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One sequence's part of a reply: its next token and the candidates after it.

    ``index``: its index among the sequences that decode. ``ahead``: the outcome of the work ahead.
    """

    index: int
    next_token_id: int
    candidate_ids: list[int]
    draft_probabilities_K: np.ndarray
    features_4K: np.ndarray | None
    ahead: AheadOutcome


@dataclass(frozen=True, kw_only=True)
class ProposalReply:
    """Draft → target: each sequence's next token, and the candidates after it with their draft probabilities.

    For the statistics: ``draft_pass_sizes_P`` (tokens of each pass since the last reply), ``num_head_tokens``
    (tokens for which a trained head has given estimates), ``times`` and ``traffic``.
    """

    next_token_ids_R: np.ndarray
    num_drafted_R: np.ndarray
    candidate_ids_C: np.ndarray
    # Exact: they are entries of float32 distributions.
    draft_probabilities_C: Float32Array
    ahead: AheadReport
    draft_pass_sizes_P: np.ndarray
    times: RoleTimes
    num_head_tokens: int = 0
    traced: TracedDrafts | None = None
    traffic: Traffic = not_sent(Traffic())

    def proposals(self) -> Iterator[Proposal]:
        """Sequence by sequence."""
        candidate_ids = self.candidate_ids_C.tolist()
        num_drafted, ends = self.num_drafted_R.tolist(), np.cumsum(self.num_drafted_R).tolist()
        outcomes = self.ahead_outcomes()
        for index, next_token_id in enumerate(self.next_token_ids_R.tolist()):
            own = slice(ends[index] - num_drafted[index], ends[index])
            yield Proposal(
                index=index,
                next_token_id=next_token_id,
                candidate_ids=candidate_ids[own],
                draft_probabilities_K=self.draft_probabilities_C[own],
                features_4K=None if self.traced is None else self.traced.features_4C[:, own],
                ahead=outcomes[index],
            )

    def ahead_outcomes(self) -> list[AheadOutcome]:
        """Sequence by sequence."""
        ahead = self.ahead
        num_adopted_R = np.where(ahead.branch_ranks_R > 0, self.num_drafted_R, 0)
        columns = (
            ahead.num_tokens_R,
            ahead.is_hit_R,
            ahead.num_branches_R,
            ahead.num_branch_tokens_R - num_adopted_R,
            ahead.branch_ranks_R,
        )
        return [AheadOutcome(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class Proposer(Protocol):
    """The draft as the engine sees it, wherever it runs."""

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        """Sample the last round's recovered and bonus tokens, and draft the next candidates.

        ``clock`` is the caller's, in its idle phase: work other than waiting is put into another phase.
        """
        ...

    def close(self) -> None:
        """No round will follow."""
        ...
