"""How far a block of n-grams goes: as long as verifying one more token pays.

A block is worth the sum of the chances that the index has learned of its tokens, less what verifying them
costs. That is told by the measured times of passes: the tokens that the run could have committed in the time
that they add. Without measured times every token is verified whose chance is not below a fixed one.

No clock, no tensors. R sequences, C tokens of several of them, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdist.policies.costs import CostModel
from specdist.policies.ngrams.text_store import NO_TEXTS, TextSettings
from specdist.policies.payoff import worth_verifying

# Of the tokens per nanosecond of the last rounds.
ROUND_MEMORY = 0.95


@dataclass(frozen=True, kw_only=True)
class NgramSettings:
    """Attributes:
    max_tokens: of one block.
    least_chance: of a token that is proposed, that it and all before it are right.
    learns_together: chances may be learned from all sequences: no token depends on them, or the run fixes
        the distribution alone.
    costs: times of passes, where they may decide; for a run whose blocks may depend on the batch.
    texts: what it looks through besides a sequence's own text.
    """

    max_tokens: int
    least_chance: float
    learns_together: bool
    costs: CostModel | None = None
    texts: TextSettings = NO_TEXTS


class BlockLengths:
    """Weighs what is proposed by the costs of passes, if there are any."""

    def __init__(self, costs: CostModel | None) -> None:
        self._costs = costs
        self._num_tokens, self._ns = 0.0, 0.0

    def observe_round(
        self, num_tokens: int, *, num_pass_tokens: int, num_rows: int, num_context: float
    ) -> None:
        """A round has committed so many tokens."""
        costs = self._costs
        if costs is None or not num_rows:
            return
        ns = costs.target_ns(num_pass_tokens, num_rows, num_context) + costs.message.look_up(num_rows)
        self._num_tokens = ROUND_MEMORY * self._num_tokens + num_tokens
        self._ns = ROUND_MEMORY * self._ns + ns

    def lengths(
        self,
        chances_C: np.ndarray,
        lengths_R: np.ndarray,
        *,
        num_pass_tokens: int,
        num_rows: int,
        num_context: float,
    ) -> np.ndarray:
        """[R]: how many of each sequence's proposed tokens pay. ``num_pass_tokens``: of the pass without
        them."""
        costs = self._costs
        if costs is None or not len(chances_C):
            return lengths_R
        pass_ns = costs.target_ns(num_pass_tokens + np.arange(len(chances_C) + 1), num_rows, num_context)
        plain_ns = costs.target_ns(num_rows, num_rows, num_context) + costs.message.look_up(num_rows)
        rate = max(num_rows / max(1.0, plain_ns), self._num_tokens / max(1.0, self._ns))
        return worth_verifying(
            chances_C, lengths_R, lambda expected: expected - rate * (pass_ns - pass_ns[0])
        )
