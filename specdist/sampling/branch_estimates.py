"""What the draft believes of the next token, beyond the one that it drew.

Kept with every drafted token are its *scores*: where the draw is the largest of them (greedy: the logits;
gumbel: the log-probabilities plus the position's noise) the scores themselves, else the distribution.

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

# That the target's largest score is at a token, as a softmax of the draft's scores. Two models of which one
# was distilled from the other agree more often than the softmax at temperature 1 says: tokens of probability
# 0.15 were the target's own in 41-62 of 100 cases, of 0.25 in 60-79, of 0.45 in 81-88.
BRANCH_TEMPERATURE = 0.5


class DraftDistributions(NamedTuple):
    """What tokens are drawn from.

    ``scores_NV`` are those behind the draw. ``undecided`` is the distribution before any noise decides the
    draw, as the temperature and the filters have shaped it; None under greedy, which forms none.
    """

    distributions: Distributions
    scores_NV: Tensor
    undecided: Dense | None


def draft_distributions(
    logits_NV: Tensor, settings: SamplingSettings, stream_keys_N: Tensor, positions_N: Tensor
) -> DraftDistributions:
    """Like :func:`specdist.sampling.coupling.next_token_distributions`, with what is behind the draw."""
    distributions = distributions_from_logits(logits_NV, settings)
    if isinstance(distributions, OneHot):
        return DraftDistributions(distributions, logits_NV, None)
    if not settings.is_coupled:
        return DraftDistributions(distributions, distributions.probabilities_NV, distributions)
    scores_NV = coupled_scores(distributions, stream_keys_N, positions_N)
    return DraftDistributions(OneHot.of_largest(scores_NV), scores_NV, distributions)


@dataclass(frozen=True)
class BranchEstimates:
    """For each position: how likely the drawn token is to be kept, and what stands there if it is not.

    ``chances_NA``: that the drawn token is not kept and this alternative stands in its place; 0 for one that
    cannot. The likeliest come first.
    """

    survival_N: np.ndarray
    alternative_ids_NA: np.ndarray
    chances_NA: np.ndarray


def estimate_branches(
    scores_NV: Tensor, drawn_N: np.ndarray, settings: SamplingSettings, num_alternatives: int
) -> BranchEstimates:
    """Estimates that steer what is prepared, never what is accepted."""
    weights_NV = (scores_NV / BRANCH_TEMPERATURE).softmax(dim=1) if not settings.is_random else scores_NV
    num_best = min(num_alternatives + 1, weights_NV.shape[1])
    best_NA = weights_NV.topk(num_best, dim=1)
    weights_NA = best_NA.values.double().cpu().numpy()
    ids_NA = best_NA.indices.cpu().numpy()
    is_drawn_NA = ids_NA == drawn_N[:, None]
    drawn_weight_N = np.where(is_drawn_NA, weights_NA, 0).sum(axis=1)
    if settings.is_random:
        # The share that rejection accepts, 1 - TV, grows from about a half, where the draft is undecided, to
        # all of it; what it recovers then is in proportion to no known thing but the draft's own opinion.
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
    and the likeliest token tells log Z: no logarithm of a whole vocabulary is taken. Logits must be finite.

    Args:
        undecided: as :func:`draft_distributions` gives it; so that no softmax is taken twice.
    """
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    probabilities_NV = logits_NV.softmax(dim=1) if undecided is None else undecided.probabilities_NV
    top_N = probabilities_NV.amax(dim=1)
    lead_N = logits_NV.amax(dim=1) - torch.linalg.vecdot(probabilities_NV, logits_NV)
    temperature = 1.0 if settings.is_greedy else settings.temperature
    # Rounding can make that of a sure token negative.
    entropies_N = (lead_N / temperature - top_N.log()).clamp(min=0)
    drawn_probabilities_N = probabilities_NV.gather(1, drawn_N[:, None])[:, 0]
    return torch.stack([entropies_N, drawn_probabilities_N, top_N]).float()
