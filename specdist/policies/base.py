"""What the draft asks after every token: another one for this row?

A policy may stop before a draw, or after a draw while keeping the token. It may never have a drawn token that
it has looked at thrown away: that would condition the kept ones on their values and bias the output.

A policy that reads a trained head is asked one draft pass later, before the next draw: the estimate of a
token comes from the draft's hidden state with that token as input. The next token is not drawn yet, so that
nothing drawn is thrown away there either; what stops has run one pass without a draw.

What it remembers of a row from block to block is the row's *history*, a few numbers that the draft keeps for
it: a row that has to give up its slot in the middle takes them along, and goes on as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from specdist.policies.options import HeadKind

# R rows, C tokens of several rows, H numbers of a history


@dataclass(frozen=True)
class DraftFeatures:
    """What the draft knows of the token that it drew last for each row, and of the distribution behind it.

    That is the one which the token was drawn from; under greedy, where it is one-hot, the softmax at
    temperature 1. What was not worked out is NaN.

    Attributes:
        entropies_R: in nats.
        probabilities_R: of the drawn token.
        top_probabilities_R: of the likeliest token.
        estimates_R: a trained head's of the token, in [0, 1]; None where there is no head.
    """

    entropies_R: np.ndarray
    probabilities_R: np.ndarray
    top_probabilities_R: np.ndarray
    estimates_R: np.ndarray | None = None

    @staticmethod
    def of_head(estimates_R: np.ndarray) -> DraftFeatures:
        """The head's estimates alone."""
        unknown_R = np.full(len(estimates_R), np.nan)
        return DraftFeatures(unknown_R, unknown_R, unknown_R, estimates_R)

    def stacked(self) -> np.ndarray:
        """[4, R], in the order of the attributes."""
        estimates_R = self.estimates_R
        if estimates_R is None:
            estimates_R = np.full(len(self.entropies_R), np.nan)
        return np.stack([self.entropies_R, self.probabilities_R, self.top_probabilities_R, estimates_R])

    def select(self, index: np.ndarray) -> DraftFeatures:
        """Those of some of the rows."""
        return DraftFeatures(
            self.entropies_R[index],
            self.probabilities_R[index],
            self.top_probabilities_R[index],
            None if self.estimates_R is None else self.estimates_R[index],
        )


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """The round that a draft batch of drafting is part of.

    Attributes:
        num_rows: rows that decode.
        num_pass_tokens: of the target's pass: all of them while the draft works ahead of that pass; in turns
            those beside the candidates, which are about to be drafted.
        is_ahead: the draft works while the target does.
    """

    num_rows: int
    num_pass_tokens: int
    is_ahead: bool


@dataclass(frozen=True, kw_only=True)
class DraftedRows:
    """The rows that a policy is asked about.

    Attributes:
        slots_R: which row it is.
        draft_rows_R: where the policy may keep what it gathers along a block: the slot itself, or a branch
            that continues it, numbered after the slots. A new block begins with ``num_drafted`` 0.
        histories_RH: after the last resolved block. A block that the target is still verifying is not in it:
            a draft that works ahead asks for the next one meanwhile.
        num_drafted: tokens of the block so far. A token that was drafted ahead as a next token is not one.
        features: of the last of them; None before the first, and for a policy that does not use them.
        earlier_estimates_R: a trained head's, of the token before the last, for a policy that is not asked
            after the pass over a token; None before the second, and where there is no head.
        reach_R: 1, or how likely it is that a branch will be its row's chain.
        round: what else is going on.
    """

    slots_R: np.ndarray
    draft_rows_R: np.ndarray
    histories_RH: np.ndarray
    num_drafted: int
    features: DraftFeatures | None
    reach_R: np.ndarray
    round: RoundContext
    earlier_estimates_R: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class VerifiedBlocks:
    """Blocks of at least one token that the target has verified: how many each had, and how many it kept."""

    histories_RH: np.ndarray
    num_drafted_R: np.ndarray
    num_accepted_R: np.ndarray


@dataclass(frozen=True, kw_only=True)
class VerifiedTokens:
    """Every row's tokens up to the first that the target has rejected: what was known of each, how many
    others stood before it in its block, and what became of it."""

    features: DraftFeatures
    depths_C: np.ndarray
    is_accepted_C: np.ndarray


class LengthPolicy(Protocol):
    """Pure arithmetic: no tensors, no clock, no knowledge of the batch's other rows."""

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of one block; room for them is reserved beforehand."""
        ...

    @property
    def uses_features(self) -> bool:
        """Whether it has to be told the features, which on a GPU are waited for after every token."""
        ...

    @property
    def initial_history(self) -> tuple[float, ...]:
        """The history [H] of a row that begins."""
        ...

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        """bool [R]: draft another token?"""
        ...

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        """[R, H]: what it remembers after these blocks."""
        ...


@runtime_checkable
class BatchPolicy(LengthPolicy, Protocol):
    """A policy that looks at the whole batch, and learns from all of it. It must use features."""

    @property
    def reads_head(self) -> bool:
        """Whether it is given a head's estimates too: of all tokens that a pass was run over."""
        ...

    def num_to_verify(
        self, features: DraftFeatures, lengths_R: np.ndarray, num_other_tokens: int
    ) -> np.ndarray:
        """[R]: how many of the tokens that were drafted ahead of each row go into the target's next pass.

        The others stay, and are verified later. ``features`` are those of all of them, row after row.
        """
        ...

    def observe_tokens(self, tokens: VerifiedTokens) -> None:
        """The target has verified these."""
        ...


@runtime_checkable
class HeadPolicy(LengthPolicy, Protocol):
    """A policy that is told a trained head's estimate of every token of the block, and is asked for another
    one when the pass is over that gives it; before the first token it is asked without."""

    @property
    def head_kind(self) -> HeadKind:
        """What the head must estimate: the chance of acceptance, or whether a token is acceptable."""
        ...


def reads_head(policy: LengthPolicy) -> bool:
    """Whether the draft must carry a trained head for it."""
    return isinstance(policy, HeadPolicy) or (isinstance(policy, BatchPolicy) and policy.reads_head)


class WithoutHistory:
    """The part of a policy that remembers nothing of a row."""

    @property
    def initial_history(self) -> tuple[float, ...]:
        return ()

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        return blocks.histories_RH
