"""SPRINTER: draft until a small verifier doubts a token.

After every drafted token x the verifier V estimates how likely Q(x) / P(x) is at most λ, a constant of its
training. While V >= τ the block goes on; a token with V < τ is kept and ends the block (Algorithm 1).

What the target does with the block is an option of the run, not of the policy. As in the paper, lossily, only
the last token (doubted, or at the cap) is verified. The paper then takes nothing more from the target's pass;
here an accepted last token is followed by a bonus token, as in every round. It follows the target's own
distribution, so the output can only come nearer to it. With ``--verify all`` every token is verified,
exactly, and V only ends blocks.

V reads the state that x was drawn from, so that its estimate comes with the draw (a block of N passed tokens
and a doubted one takes N + 1 draft passes, Theorem 3), or the state with x as input, one pass later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftSequences, WithoutHistory
from specdist.policies.options import (
    MAX_DRAFT_TOKENS,
    SHARE,
    Grid,
    HeadKind,
    RegisteredPolicy,
    policy_option,
    shared_option,
)
from specdist.policies.references import Reference

ZHONG_2025 = Reference(
    authors="Zhong, Teku, Tandon",
    year=2025,
    title="Speeding up Speculative Decoding via Sequential Approximate Verification (SPRINTER)",
    arxiv="2502.04557",
)


@dataclass(frozen=True, kw_only=True)
class Sprinter(WithoutHistory, RegisteredPolicy):
    """Goes on while the verifier's estimate of the last token is at least ``verifier_threshold``."""

    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    verifier_threshold: float = policy_option(
        0.5, SHARE, symbol="τ", help="stop after a token of which the verifier is less sure than this"
    )
    name = "sprinter"
    drafts = "until the verifier is less sure than τ of a token; **not exact** unless `--verify all`"
    papers = (ZHONG_2025,)
    grid: ClassVar[Grid] = {"verifier_threshold": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)}
    uses_features = False
    head_kind: ClassVar[HeadKind] = "verifier"
    needs_last_estimate: ClassVar[bool] = True

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        wants_R = np.full(len(rows.slots_R), rows.num_drafted < self.max_draft_tokens)
        if rows.features is not None and rows.features.estimates_R is not None:
            wants_R &= rows.features.estimates_R >= self.verifier_threshold
        return wants_R
