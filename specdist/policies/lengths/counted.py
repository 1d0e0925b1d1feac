"""Policies that decide by numbers of tokens: a constant length, and lengths that follow what was accepted of
the blocks before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdist.policies.base import DraftSequences, VerifiedBlocks
from specdist.policies.options import (
    COUNT,
    FIRST_DRAFT_TOKENS,
    MAX_DRAFT_TOKENS,
    SHARE,
    RegisteredPolicy,
    policy_option,
    shared_option,
)

LEVIATHAN_2023 = (
    "Leviathan, Kalman, Matias (2023). *Fast Inference from Transformers via Speculative Decoding*. ICML "
    "2023; [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)"
)
GAUTAM_2025 = (
    "Gautam, Shrestha, Reddy (2025). *Token-Driven GammaTune: Adaptive Calibration for Enhanced Speculative "
    "Decoding*. [arXiv:2504.00030](https://arxiv.org/abs/2504.00030)"
)
# The numbers of transformers' heuristic, and the fewest draft tokens of a block, GammaTune's γ_min.
GROWTH, SHRINKAGE, FEWEST = 2, 1, 1
# GammaTune's δ, which the paper does not give.
BONUS = 2.0


@dataclass(frozen=True)
class FixedLength(RegisteredPolicy):
    """Always ``num_draft_tokens`` (Leviathan et al. 2023), the baseline of every adaptive policy; 0 never
    drafts."""

    num_draft_tokens: int = policy_option(5, COUNT, symbol="K", help="draft tokens of every block")
    name = "fixed"
    drafts = "always K tokens"
    papers = (LEVIATHAN_2023,)

    @property
    def max_draft_tokens(self) -> int:
        return self.num_draft_tokens

    def wants(self, rows: DraftSequences) -> np.ndarray:
        return np.full(len(rows.slots_R), self.num_draft_tokens)


@dataclass(frozen=True, kw_only=True)
class HfHeuristic(RegisteredPolicy):
    """The heuristic of transformers (``num_assistant_tokens_schedule="heuristic"``): two more after a fully
    accepted block, one less after any other. A sequence's history is the length of its next block;
    ``num_draft_tokens`` is the first."""

    num_draft_tokens: int = shared_option(FIRST_DRAFT_TOKENS)
    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    name = "hf_heuristic"
    drafts = "2 more after a block that was accepted whole, else 1 less (transformers)"

    @property
    def initial_history(self) -> tuple[float, ...]:
        return (self.num_draft_tokens,)

    def wants(self, rows: DraftSequences) -> np.ndarray:
        return rows.histories_RH[:, 0].astype(np.int64)

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        lengths_R = blocks.histories_RH[:, 0]
        lengths_R = np.where(
            blocks.num_accepted_R == blocks.num_drafted_R,
            np.minimum(lengths_R + GROWTH, self.max_draft_tokens),
            np.maximum(lengths_R - SHRINKAGE, FEWEST),
        )
        return lengths_R[:, None]


@dataclass(frozen=True, kw_only=True)
class GammaTune(RegisteredPolicy):
    """GammaTune (Gautam, Shrestha, Reddy 2025): the length follows a moving average of what was accepted. A
    sequence's history is its window w, which begins at ``num_draft_tokens``.

    Algorithm 1, with A accepted tokens of the sequence's last block:

        A <- A + δ                                       if all of the block was accepted
        w <- min(γ_max, max(γ_min, (1 - η) w + η A))
        γ <- ceil(w)

    The paper has this twice, and not alike. These lines are the prose of section 4.1, where "an augmentation
    heuristic increases A". Line 2 of its Algorithm 1, as printed, puts A + δ into γ, which line 5 overwrites
    with ceil(w): the bonus is lost, w never exceeds γ, and a length can only fall.

    A block may be shorter than γ, at a sequence's end or where the draft does not work so far ahead. Then
    "all of the block" means the drafted tokens, as in transformers' heuristic.
    """

    num_draft_tokens: int = shared_option(FIRST_DRAFT_TOKENS)
    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    length_rate: float = policy_option(0.5, SHARE, symbol="η", help="weight of the last block in the average")
    name = "gammatune"
    drafts = "a moving average of what was accepted, δ more for a block accepted whole"
    papers = (GAUTAM_2025,)

    @property
    def initial_history(self) -> tuple[float, ...]:
        return (self.num_draft_tokens,)

    def wants(self, rows: DraftSequences) -> np.ndarray:
        return np.ceil(rows.histories_RH[:, 0]).astype(np.int64)

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        is_whole_R = blocks.num_accepted_R == blocks.num_drafted_R
        accepted_R = blocks.num_accepted_R + np.where(is_whole_R, BONUS, 0.0)
        windows_R = blocks.histories_RH[:, 0]
        # In this form a window that is where it is drawn to stays there to the last bit, below the ceiling.
        windows_R = windows_R + self.length_rate * (accepted_R - windows_R)
        return np.clip(windows_R, FEWEST, self.max_draft_tokens)[:, None]


@dataclass(frozen=True, kw_only=True)
class GammaTunePlus(GammaTune):
    """GammaTune+ (section 4.2): also stops inside a block, after a token whose distribution gives its
    likeliest token less than ``stop_probability`` (τ).

    A block that τ has stopped at A tokens, all of them accepted, earns the bonus like any other that was
    accepted whole: w moves towards A + δ, which may be less than γ. By the letter of A = γ it would earn
    nothing, and w would move towards A; the paper does not say which.
    """

    stop_probability: float = policy_option(
        0.4, SHARE, symbol="τ", help="stop after a token whose distribution gives its likeliest token less"
    )
    name = "gammatune_plus"
    drafts = "the same, and ends a block where the likeliest token falls below τ"
    uses_features = True

    def wants(self, rows: DraftSequences) -> np.ndarray:
        lengths_R = super().wants(rows)
        if rows.features is None:
            return lengths_R
        is_likely_DR = rows.features.top_probabilities >= self.stop_probability
        return np.minimum(lengths_R, rows.up_to_first(is_likely_DR, self.max_draft_tokens))
