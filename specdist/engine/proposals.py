"""What the target's side and the draft's side say to each other, once per round.

R rows that decode, W of them whose decision is drawn from the target's distribution, C candidates of all rows
one after the other, T context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specdist.cache.pages import PageUpdates
from specdist.models.flat import FlatBatch
from specdist.sampling.distributions import Distributions

DRAW = -1


@dataclass(frozen=True, kw_only=True)
class OpenedRows:
    """Rows admitted since the last request: where they live, their random stream, the steps they have had."""

    slots: np.ndarray
    stream_keys: np.ndarray
    num_steps: np.ndarray


@dataclass(frozen=True, kw_only=True)
class ProposalRequest:
    """Target → draft.

    Attributes:
        slots_R, num_accepted_R: how many candidates of its last block each row keeps.
        decision_ids_R: the token behind them where it is known (greedy, or a resumed row), else ``DRAW``.
        draft_limits_R: most new candidates per row.
        decisions_W: the target's distribution at the decision position of every ``DRAW`` row, in order.
        opened, context: rows that begin, and the context tokens of this round's target pass: after the
            candidates are on their way, the draft runs them too.
    """

    page_updates: PageUpdates
    slots_R: np.ndarray
    num_accepted_R: np.ndarray
    decision_ids_R: np.ndarray
    draft_limits_R: np.ndarray
    decisions_W: Distributions | None
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


@dataclass(frozen=True, kw_only=True)
class ProposalReply:
    """Draft → target: each row's decision, and the candidates behind it with the probability of each.

    ``num_draft_passes`` (what this reply took), ``times`` and ``transfer_ns`` (what the target's side spent
    on sending and receiving, waiting aside) feed the statistics.
    """

    decision_ids_R: np.ndarray
    num_drafted_R: np.ndarray
    candidate_ids_C: np.ndarray
    draft_probabilities_C: np.ndarray
    num_draft_passes: int
    times: RoleTimes
    transfer_ns: int = 0


class Proposer(Protocol):
    """The draft as the engine sees it, wherever it runs."""

    @property
    def max_draft_tokens(self) -> int: ...

    def propose(self, request: ProposalRequest) -> ProposalReply:
        """Settle the last round's decisions and draft the next candidates."""
        ...

    def close(self) -> None:
        """The last round is over."""
        ...
