"""What the draft asks after every token: another one for this row?

A policy may stop before a draw, or after a draw while keeping the token. It may never have a drawn token that
it has looked at thrown away: that would condition the kept ones on their values and bias the output.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

# R rows


class LengthPolicy(Protocol):
    """State per slot and pure arithmetic: no tensors, no clock, no knowledge of the batch's other rows."""

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of one block; room for them is reserved beforehand."""
        ...

    def wants_more(self, slots_R: np.ndarray, num_drafted: int) -> np.ndarray:
        """bool [R]: draft another token behind the ``num_drafted`` that these rows have in this round?"""
        ...
