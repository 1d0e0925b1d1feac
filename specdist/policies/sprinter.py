"""SPRINTER: draft until a small verifier doubts a token.

After every drafted token x the verifier V says how sure it is that Q(x) / P(x) is at most λ, which was fixed
when it was trained. While V >= τ the block goes on; the token with V < τ is kept and ends it (Algorithm 1).

What the target does with the block is the run's choice, not the policy's. In the paper's own, lossy way only
the last token, doubted or at the cap, is verified. The paper then takes no more from the target's pass; here
an accepted last token is followed by a bonus token from the distribution that the pass gives anyway, as in
every round. It follows the target's own distribution, so that the output is only nearer to it. In the exact
way the verifier says when to stop, and everything is verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftedRows, WithoutHistory
from specdist.policies.options import HeadKind


@dataclass(frozen=True, kw_only=True)
class Sprinter(WithoutHistory):
    """Goes on while the verifier's estimate of the last token is at least ``verifier_threshold``."""

    max_draft_tokens: int
    verifier_threshold: float
    uses_features: ClassVar[bool] = False
    head_kind: ClassVar[HeadKind] = "verifier"

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        wants_R = np.full(len(rows.slots_R), rows.num_drafted < self.max_draft_tokens)
        if rows.features is not None and rows.features.estimates_R is not None:
            wants_R &= rows.features.estimates_R >= self.verifier_threshold
        return wants_R
