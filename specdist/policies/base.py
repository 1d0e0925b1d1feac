"""What the draft asks after every token: another one for this row?

A policy may stop before a draw, or after a draw while keeping the token. It may never have a drawn token that
it has looked at thrown away: that would condition the kept ones on their values and bias the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

# R rows


@dataclass(frozen=True, kw_only=True)
class DraftFeatures:
    """What the draft knows of the token that it drew last for each row, and of the distribution behind it.

    That is the one which the token was drawn from; under greedy, where it is one-hot, the softmax at
    temperature 1.

    Attributes:
        entropies_R: in nats.
        probabilities_R: of the drawn token.
        top_probabilities_R: of the likeliest token.
    """

    entropies_R: np.ndarray
    probabilities_R: np.ndarray
    top_probabilities_R: np.ndarray


@dataclass(frozen=True, kw_only=True)
class DraftedRows:
    """The rows that a policy is asked about.

    Attributes:
        slots_R: whose history counts.
        chains_R: where the policy may keep what it gathers along a block: the slot itself, or a branch that
            continues it, numbered behind the slots. A new block begins with ``num_drafted`` 0.
        num_drafted: tokens of the block so far.
        features: of the last of them; None before the first, and for a policy that does not use them.
    """

    slots_R: np.ndarray
    chains_R: np.ndarray
    num_drafted: int
    features: DraftFeatures | None


class LengthPolicy(Protocol):
    """State per slot and pure arithmetic: no tensors, no clock, no knowledge of the batch's other rows."""

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of one block; room for them is reserved beforehand."""
        ...

    @property
    def uses_features(self) -> bool:
        """Whether it has to be told the features, which on a GPU are waited for after every token."""
        ...

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        """bool [R]: draft another token?"""
        ...
