"""The probability that a drafted token is accepted, learned during the run: of a token that is drawn, by its
features; of one that will be, by what a block drafter knows of its place; and of any other.

Every verified token is a free observation. A logistic regression on the draft's features of a token starts
from a prior fitted on small distilled pairs and takes one Newton step per round, so it holds the Laplace
approximation of its posterior (an extended Kalman filter that forgets: texts change in the middle of a run).
Pooled over all sequences. No tensors.

N tokens, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Weight of the prior: about this many observations of a token with acceptance probability 1/2.
PRIOR_PRECISION = 16.0
# Half-life of an observation, in tokens.
MEMORY = 1024
# Weights of: 1, logit of the top probability, square root of the entropy, log of drawn over top probability,
# log of the depth. True: target and draft draw with the same noise or greedily; False: the rejection rule.
PRIOR_WEIGHTS = {True: (1.8, 1.1, 0.0, 0.0, 0.0), False: (1.0, 0.5, 0.0, 0.0, 0.0)}
NUM_FEATURES = 5
# The prior of a place of a block: offset, and slope over the logit of the draft's confidence. Means of five
# models with drafts by DFlash, DSpark or MTP, whose slopes are 0.44 to 0.83 and offsets -0.92 to -0.14
# (vLLM's pull request 52228).
PRIOR_WEIGHTS_OF_PLACES = (-0.44, 0.59)
SMALLEST = 1e-4
MOST_CERTAIN = 30.0
# The prior of a token that is not drawn: acceptance assumed before any token was verified, and how many
# verified tokens the assumption is worth; and how many verified tokens tell the acceptance of a pair. Only
# drafted tokens teach anything: until so many are verified the forecast is a standard deviation higher than
# what is likely, since a low one that is wrong would never be found out.
PRIOR_ACCEPTANCE, PRIOR_TOKENS, NUM_TELLING = 0.8, 8, 24
# Half-life of both the assumption and what was seen, in verified tokens.
FORECAST_MEMORY = 256
# Half-life in rounds without drafts of what was seen, in whose place the assumption comes back, so that
# drafting is tried again.
IDLE_MEMORY = 1024
# Weight of the batch's estimate for a sequence, in tokens of its own.
ROW_PRIOR_TOKENS = 32
LARGEST_FORECAST = 0.98


def token_features(
    entropies_N: np.ndarray,
    probabilities_N: np.ndarray,
    top_probabilities_N: np.ndarray,
    depths_N: np.ndarray | int,
) -> np.ndarray:
    """[N, F]: features of drafted tokens; depths count from 0. All may have the same one."""
    top_N = np.minimum(np.maximum(top_probabilities_N, SMALLEST), 1 - SMALLEST)
    drawn_N = np.maximum(probabilities_N, SMALLEST)
    features_NF = np.empty((len(top_N), NUM_FEATURES))
    features_NF[:, 0] = 1.0
    features_NF[:, 1] = np.log(top_N) - np.log1p(-top_N)
    features_NF[:, 2] = np.sqrt(np.maximum(entropies_N, 0))
    features_NF[:, 3] = np.log(drawn_N / np.maximum(top_N, drawn_N))
    features_NF[:, 4] = np.log1p(depths_N)
    return features_NF


def place_features(confidences_N: np.ndarray) -> np.ndarray:
    """[N, 2]: of places of blocks: 1, and the logit of the draft's confidence."""
    chances_N = np.minimum(np.maximum(confidences_N, SMALLEST), 1 - SMALLEST)
    return np.stack([np.ones_like(chances_N), np.log(chances_N) - np.log1p(-chances_N)], axis=1)


class AcceptanceModel:
    """P(accepted | features)."""

    def __init__(self, prior_weights: Sequence[float]) -> None:
        self._weights = np.array(prior_weights)
        self._prior = np.eye(len(self._weights)) * PRIOR_PRECISION / 4
        self._precision = self._prior

    def predict(self, features_NF: np.ndarray) -> np.ndarray:
        """[N] probabilities in (0, 1)."""
        # A product of matrices may round a token's sum in another way beside others.
        heights_N = (features_NF * self._weights).sum(axis=1)
        heights_N = np.minimum(np.maximum(heights_N, -MOST_CERTAIN), MOST_CERTAIN)
        return 1 / (1 + np.exp(-heights_N))

    def observe(self, features_NF: np.ndarray, is_accepted_N: np.ndarray) -> None:
        """Learn from one round's verified tokens: of every sequence, the accepted ones and the first rejected
        one."""
        if not len(features_NF):
            return
        predicted_N = self.predict(features_NF)
        curvature_N = np.maximum(predicted_N * (1 - predicted_N), SMALLEST)
        kept = 0.5 ** (len(features_NF) / MEMORY)
        self._precision = kept * self._precision + (1 - kept) * self._prior
        self._precision += (features_NF * curvature_N[:, None]).T @ features_NF
        gradient_F = features_NF.T @ (is_accepted_N - predicted_N)
        self._weights = self._weights + np.linalg.solve(self._precision, gradient_F)


class Forecast:
    """P(accepted) of a token that is not drawn yet."""

    def __init__(self) -> None:
        # Decaying: the weight of the assumption, and tokens accepted and verified.
        self._prior_tokens, self._seen = float(PRIOR_TOKENS), np.zeros(2)

    @property
    def num_lacking(self) -> float:
        """Tokens that are still to be verified before the acceptance is known; at most 0 when it is."""
        return NUM_TELLING - float(self._seen[1])

    @property
    def of_all(self) -> float:
        """The acceptance of any sequence's next token."""
        num_accepted, num_verified = self._seen.tolist()
        num_tokens = self._prior_tokens + num_verified
        likely: float = (self._prior_tokens * PRIOR_ACCEPTANCE + num_accepted) / num_tokens
        return likely + (self.num_lacking > 0) * math.sqrt(likely * (1 - likely) / num_tokens)

    def of_rows(self, num_accepted_R: np.ndarray, num_verified_R: np.ndarray) -> np.ndarray:
        """[R]: of sequences with so many accepted and verified tokens of their own."""
        forecast_R = (ROW_PRIOR_TOKENS * self.of_all + num_accepted_R) / (ROW_PRIOR_TOKENS + num_verified_R)
        return np.minimum(forecast_R, LARGEST_FORECAST)

    def observe(self, num_accepted: float, num_verified: float) -> None:
        """Learn from so many verified tokens."""
        kept = 0.5 ** (num_verified / FORECAST_MEMORY)
        self._prior_tokens *= kept
        self._seen = kept * self._seen + (num_accepted, num_verified)

    def pause(self, num_rounds: int) -> None:
        """Rounds have passed without drafts."""
        kept = 0.5 ** (num_rounds / IDLE_MEMORY)
        self._seen *= kept
        self._prior_tokens += (1 - kept) * (PRIOR_TOKENS - self._prior_tokens)
