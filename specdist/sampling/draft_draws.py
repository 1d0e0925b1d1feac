"""The draws of a draft: from logits to tokens, and what is kept of them. All on the device of the logits.

N positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specdist.sampling.branch_estimates import draft_distributions, draft_features, top_probabilities
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.row_filters import RowFilters


class Drawn(NamedTuple):
    """Drawn tokens and their probabilities (float64); their features [3, N], if they are kept; and what
    decided the draws, as of :class:`specdist.sampling.branch_estimates.DraftDistributions`."""

    token_ids_N: Tensor
    probabilities_N: Tensor
    features_3N: Tensor | None
    scores_NV: Tensor


@dataclass(frozen=True, kw_only=True)
class DraftDraws:
    """How a draft draws its tokens.

    Attributes:
        vocab_size: ids that it has in common with the target: logits of others are left out.
        keeps_scores, keeps_features: they will be asked for.
    """

    settings: SamplingSettings
    vocab_size: int
    keeps_scores: bool
    keeps_features: bool

    def top_probabilities(self, logits_NV: Tensor) -> Tensor:
        """float32 [N]: of what would be drawn from these logits, which are not to be processed."""
        return top_probabilities(logits_NV[:, : self.vocab_size], self.settings)

    def draw(
        self,
        logits_NV: Tensor,
        stream_keys_N: Tensor,
        positions_N: Tensor,
        uniforms_N: Tensor | None,
        filters: RowFilters | None = None,
    ) -> Drawn:
        """One token each.

        Args:
            stream_keys_N, positions_N: as of :func:`specdist.sampling.coupling.coupled_scores`.
            uniforms_N: as of :class:`specdist.sampling.distributions.Dense`; None if draws are not random.
            filters: of logits that are processed.
        """
        logits_NV = logits_NV[:, : self.vocab_size]
        distributions_N, scores_NV, undecided = draft_distributions(
            logits_NV, self.settings, stream_keys_N, positions_N, filters
        )
        # Where the logits are not finite, any id will do for the next pass: the block is cut before it.
        drawn_N = distributions_N.draw(uniforms_N).clamp(min=0)
        features_3N = None
        if self.keeps_features:
            features_3N = draft_features(logits_NV, undecided, drawn_N, self.settings)
        return Drawn(drawn_N, distributions_N.probabilities_of(drawn_N), features_3N, scores_NV)
