"""The draws of a draft, and what its distribution says about a drafted token: features, and the likeliest
alternatives. All on the device of the logits.

With every drafted token its *scores* are kept: where the draw is the largest score (greedy: the logits;
gumbel: the log-probabilities plus the position's noise), these scores, else the distribution.

N positions, V vocabulary, A alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.sampling.coupling import coupled_scores
from specdist.sampling.distributions import (
    Dense,
    Distributions,
    OneHot,
    SamplingSettings,
    distributions_from_logits,
)
from specdist.sampling.processing.row_filters import RowFilters

# The probability that a token has the target's largest score, as a softmax of the draft's scores. A draft
# that was distilled from its target agrees with it more often than the softmax at temperature 1 says: tokens
# of probability 0.15 were the target's own in 41-62 of 100 cases, of 0.25 in 60-79, of 0.45 in 81-88.
BRANCH_TEMPERATURE = 0.5


class DraftDistributions(NamedTuple):
    """What tokens are drawn from.

    ``scores_NV``: the scores that decide the draw. ``undecided``: the distribution after temperature and
    filters, before any shared noise; None under greedy, which forms none.
    """

    distributions: Distributions
    scores_NV: Tensor
    undecided: Dense | None


def draft_distributions(
    logits_NV: Tensor,
    settings: SamplingSettings,
    stream_keys_N: Tensor,
    positions_N: Tensor,
    filters: RowFilters | None = None,
) -> DraftDistributions:
    """Like :func:`specdist.sampling.coupling.next_token_distributions`, with the scores that decide the
    draw."""
    distributions = distributions_from_logits(logits_NV, settings, filters)
    if isinstance(distributions, OneHot):
        return DraftDistributions(distributions, logits_NV, None)
    if not settings.is_coupled:
        return DraftDistributions(distributions, distributions.probabilities_NV, distributions)
    scores_NV = coupled_scores(distributions, stream_keys_N, positions_N)
    return DraftDistributions(OneHot.of_largest(scores_NV), scores_NV, distributions)


@dataclass(frozen=True)
class BranchEstimates:
    """What is estimated of each position: the probability that the drawn token is accepted, and the
    alternatives to it.

    ``chances_NA``: the probability that the drawn token is rejected and this alternative takes its place; 0
    for the drawn token itself. The likeliest come first.
    """

    survival_N: np.ndarray
    alternative_ids_NA: np.ndarray
    chances_NA: np.ndarray


def likeliest(scores_NV: Tensor, settings: SamplingSettings, num_alternatives: int) -> Tensor:
    """float64 [2, N, A], on the scores' device: weights of the likeliest tokens of each position, one more
    than the alternatives to it, and their ids, which are exact."""
    weights_NV = (scores_NV / BRANCH_TEMPERATURE).softmax(dim=1) if not settings.is_random else scores_NV
    best_NA = weights_NV.topk(min(num_alternatives + 1, weights_NV.shape[1]), dim=1)
    return torch.stack([best_NA.values.double(), best_NA.indices.double()])


def estimate_branches(
    likeliest_2NA: Tensor, drawn_N: np.ndarray, settings: SamplingSettings
) -> BranchEstimates:
    """Estimates that decide what is prepared, never what is accepted. Waits for what :func:`likeliest` has
    found."""
    weights_NA, ids_NA = likeliest_2NA.cpu().numpy()
    ids_NA = ids_NA.astype(np.int64)
    is_drawn_NA = ids_NA == drawn_N[:, None]
    drawn_weight_N = np.where(is_drawn_NA, weights_NA, 0).sum(axis=1)
    if settings.is_random:
        # The acceptance rate, 1 - TV, grows from about a half, where the draft is uncertain, to 1. The
        # recovered token's distribution is unknown here; the draft's own distribution is the best estimate of
        # it.
        survival_N = (1 + weights_NA[:, 0]) / 2
        others_N = np.maximum(1 - drawn_weight_N, np.finfo(float).tiny)
        chances_NA = weights_NA * ((1 - survival_N) / others_N)[:, None]
    else:
        survival_N = drawn_weight_N
        chances_NA = weights_NA
    chances_NA = np.where(is_drawn_NA, 0, chances_NA)
    return BranchEstimates(survival_N, ids_NA, chances_NA)


def draft_features(
    logits_NV: Tensor, undecided: Dense | None, drawn_N: Tensor, settings: SamplingSettings
) -> Tensor:
    """float32 [3, N]: entropy in nats, probability of the drawn token, probability of the likeliest one.

    Of the distribution that the token was drawn from; of the softmax at temperature 1 under greedy.

    With logits s and probabilities p = exp(s / T - log Z), where p > 0, the entropy is log Z - sum p s / T,
    and log Z follows from the likeliest token: no logarithm of a whole vocabulary is taken. Logits must be
    finite.

    Args:
        undecided: from :func:`draft_distributions`, so that no softmax is computed twice.
    """
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if settings.processing is not None:
        # For a token that is not allowed, 0 times minus infinity would be no number.
        logits_NV = logits_NV.clamp(min=torch.finfo(logits_NV.dtype).min)
    probabilities_NV = logits_NV.softmax(dim=1) if undecided is None else undecided.probabilities_NV
    top_N = probabilities_NV.amax(dim=1)
    if settings.processing is not None:
        # Entropies at each position's own temperature, and with tokens left out.
        entropies_N = torch.special.entr(probabilities_NV).sum(dim=1)
    else:
        lead_N = logits_NV.amax(dim=1) - torch.linalg.vecdot(probabilities_NV, logits_NV)
        temperature = 1.0 if settings.is_greedy else settings.temperature
        # Rounding can make the entropy of a certain token negative.
        entropies_N = (lead_N / temperature - top_N.log()).clamp(min=0)
    drawn_probabilities_N = probabilities_NV.gather(1, drawn_N[:, None])[:, 0]
    return torch.stack([entropies_N, drawn_probabilities_N, top_N]).float()


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
        """float32 [N]: of the likeliest token, in the distribution that :func:`draft_features` describes, by
        logits that are not to be processed."""
        logits_NV = logits_NV[:, : self.vocab_size]
        distributions = distributions_from_logits(logits_NV, self.settings)
        if isinstance(distributions, Dense):
            return distributions.probabilities_NV.amax(dim=1).float()
        logits_NV = logits_NV.float()
        return (logits_NV.amax(dim=1) - logits_NV.logsumexp(dim=1)).exp()

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
