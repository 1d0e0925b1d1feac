"""What the target's side and the draft's side say to each other, once per round.

R rows that decode, W of them whose next token is drawn from the target's distribution, C candidates of all
rows one after the other, T context tokens, P passes of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specdist.cache.pages import PageUpdates
from specdist.engine.timeline import Timeline
from specdist.models.flat import FlatBatch
from specdist.sampling.distributions import Distributions
from specdist.stats.shard import AheadOutcome

DRAW = -1
NO_CONTEXT = -1


@dataclass(frozen=True, kw_only=True)
class DraftAhead:
    """What the draft does with the time of a target pass: tokens after each row's candidates, the first of
    which is a next token, and branches per row. 0 tokens: it waits."""

    num_tokens: int = 0
    num_branches: int = 0


@dataclass(frozen=True, kw_only=True)
class OpenedRows:
    """Rows admitted since the last request: where they live, their random stream, the chains they have lost,
    the length of the context after which to draft ahead (``NO_CONTEXT`` for a resumed row), and the most
    tokens that they may have."""

    slots: np.ndarray
    stream_keys: np.ndarray
    num_misses: np.ndarray
    context_lengths: np.ndarray
    max_lengths: np.ndarray


@dataclass(frozen=True, kw_only=True)
class ProposalRequest:
    """Target → draft.

    Attributes:
        slots_R, num_accepted_R: how many candidates of its last block each row keeps.
        next_token_ids_R: the token after them where it is known (greedy, or a resumed row), else ``DRAW``.
        draft_now_R: most candidates to draft before the reply, after those drafted ahead; when the draft
            works ahead, only a resumed row has some.
        next_distributions_W: the target's distribution at the next-token position of every ``DRAW`` row, in
            order.
        suspended_slots: of rows that were preempted, and will be opened again; a slot may have a new row.
        opened, context: rows that begin, and the context tokens of this round's target pass: when the
            candidates are on their way, the draft runs them too.
    """

    page_updates: PageUpdates
    slots_R: np.ndarray
    num_accepted_R: np.ndarray
    next_token_ids_R: np.ndarray
    draft_now_R: np.ndarray
    next_distributions_W: Distributions | None
    suspended_slots: np.ndarray
    opened: OpenedRows
    context: FlatBatch


@dataclass(frozen=True)
class RoleTimes:
    """Nanoseconds that the draft's side spent since its last reply, and the most memory it has held."""

    prefill: int = 0
    draft: int = 0
    transfer: int = 0
    idle: int = 0
    peak_memory_bytes: int = 0


@dataclass(frozen=True)
class Traffic:
    """What has travelled: between the target's lead and the draft, or among the target's ranks."""

    num_messages: int = 0
    num_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.num_messages + other.num_messages, self.num_bytes + other.num_bytes)

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.num_messages - earlier.num_messages, self.num_bytes - earlier.num_bytes)


@dataclass(frozen=True, kw_only=True)
class TracedDrafts:
    """What a trace must know of drafted tokens: the four features of the candidates, and of the token that
    was drafted ahead in a next token's place; NaN for an estimate that no pass has given yet.

    Attributes:
        features_4C: of the candidates of this reply.
        is_verified_R, is_hit_R: whether a token stood in the place of each row's next token and was verified,
            and whether it was accepted.
        token_ids_R, features_4R, acceptance_R: of that token; the probability with which the target accepts
            it.
    """

    features_4C: np.ndarray
    is_verified_R: np.ndarray
    is_hit_R: np.ndarray
    token_ids_R: np.ndarray
    features_4R: np.ndarray
    acceptance_R: np.ndarray


@dataclass(frozen=True, kw_only=True)
class ProposalReply:
    """Draft → target: each row's next token, and the candidates after it with the probability of each.

    ``num_ahead_R`` tokens had been drafted ahead of a row. ``is_hit_R`` says that the first of them is its
    decision and the others are its candidates; else they are lost. ``num_branches_R`` branches with
    ``num_branch_tokens_R`` tokens had been prepared beside them; ``branch_ranks_R`` is the rank of the
    alternative whose branch has become the row's candidates, from 1, and 0 where all branches are lost.

    ``draft_pass_sizes_P`` (tokens of each pass since the last reply), ``num_head_tokens`` (those of which a
    trained head has given estimates), ``times`` and ``traffic`` feed the statistics.
    """

    next_token_ids_R: np.ndarray
    num_drafted_R: np.ndarray
    candidate_ids_C: np.ndarray
    draft_probabilities_C: np.ndarray
    num_ahead_R: np.ndarray
    is_hit_R: np.ndarray
    num_branches_R: np.ndarray
    num_branch_tokens_R: np.ndarray
    branch_ranks_R: np.ndarray
    draft_pass_sizes_P: np.ndarray
    times: RoleTimes
    num_head_tokens: int = 0
    traced: TracedDrafts | None = None
    traffic: Traffic = Traffic()

    def ahead_outcomes(self) -> list[AheadOutcome]:
        """Row by row, what has become of the work ahead."""
        num_adopted_R = np.where(self.branch_ranks_R > 0, self.num_drafted_R, 0)
        columns = (
            self.num_ahead_R,
            self.is_hit_R,
            self.num_branches_R,
            self.num_branch_tokens_R - num_adopted_R,
            self.branch_ranks_R,
        )
        return [AheadOutcome(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class Proposer(Protocol):
    """The draft as the engine sees it, wherever it runs."""

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        """Resolve the last round's next tokens and draft the next candidates.

        ``clock`` is the caller's, in its idle phase: what is not waiting here is put into another one.
        """
        ...

    def close(self) -> None:
        """The last round is over."""
        ...
