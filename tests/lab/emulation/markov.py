"""A Markov pair: two models that are tables of logits by the last token, with a given acceptance.

Tokens stand on a circle. From each the target goes on to one of the next few, so that every token is equally
frequent, whatever is sampled; greedily it goes round the circle. A stretch of the circle is as long as the
generator needs for as many tokens: easy and hard stretches come in turn, as they do in text.

Acceptance is the mean over the target's own tokens of the probability that the draft's next token is
accepted: whether both models' likeliest tokens agree under greedy, else sum min(P, Q) (Leviathan et al. 2023,
Corollary 3.6). The draft is more certain where it is right, so that policies have something to go by.

V tokens, M of them with a logit of their own, N logits that are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# The target's probabilities of the next few tokens on the circle.
TARGET_WEIGHTS = np.array([0.7, *(0.3 * 0.5 ** np.arange(1, 7)), 0.3 * 0.5**6])
# Length of an easy or hard stretch; twice this divides the vocabulary.
STRETCH_TOKENS = 32
# Tokens that only the draft believes in, and where they stand from the last token.
NUM_WRONG = 16
# The logarithm of the probability of all other tokens, at temperature 1.
FLOOR = -30.0
# A distilled 2M draft after the greedy tokens of its 10M target (GSM8K and Spec-Bench, 3,481 tokens): deciles
# of its largest probability where it agrees with the target and where it does not, and what the tokens after
# the first have of the rest.
RIGHT = (0.017, 0.137, 0.209, 0.290, 0.376, 0.466, 0.578, 0.703, 0.809, 0.940, 1.0)
WRONG = (0.014, 0.046, 0.065, 0.090, 0.116, 0.146, 0.176, 0.216, 0.282, 0.356, 0.699)
SHARES = np.array([0.159, 0.082, 0.057, 0.042, 0.034, 0.028, 0.025, 0.021])
# Where it does not agree, the target's token is among the n after the first with probability
# 1 - (1 + n)^-RANK_EXPONENT. So 2 branches of a block of 5 catch 0.50 of the misses, 6 of 9 0.62, 12 of 9
# 0.75; of that pair it was 0.50, 0.65 and 0.75.
RANK_EXPONENT = 1.5


@dataclass(frozen=True)
class MarkovModel:
    """Of each last token, the next tokens ``ids_VM`` with logits of their own; all others have ``floor``."""

    ids_VM: Tensor
    logits_VM: Tensor
    floor: float

    @property
    def vocab_size(self) -> int:
        return len(self.ids_VM)

    def logits(self, last_ids_N: Tensor) -> Tensor:
        """float32 [N, V] of the tokens after these."""
        logits_NV = torch.full((len(last_ids_N), self.vocab_size), self.floor)
        return logits_NV.scatter_(1, self.ids_VM[last_ids_N], self.logits_VM[last_ids_N])


@dataclass(frozen=True)
class MarkovPair:
    """``order_V``: the tokens in their order on the circle. ``acceptance_V``: of the draft's token after each
    place of it."""

    target: MarkovModel
    draft: MarkovModel
    order_V: np.ndarray
    acceptance_V: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """The dials of a pair.

    Attributes:
        acceptance: of drafted tokens, in [0, 1].
        variation: in [0, 1]: of the largest difference between easy and hard stretches that keeps the mean.
        temperature: at which the acceptance holds; 0 is greedy.
    """

    vocab_size: int
    acceptance: float
    variation: float = 0.0
    temperature: float = 0.0
    seed: int = 0


def markov_pair(settings: PairSettings) -> MarkovPair:
    """The same tables from the same settings, in whatever process."""
    generator = np.random.default_rng(settings.seed)
    vocab_size = settings.vocab_size
    order_V = generator.permutation(vocab_size)
    scale = settings.temperature or 1.0
    ahead_VM = np.arange(vocab_size)[:, None] + 1 + np.arange(len(TARGET_WEIGHTS))
    wrong_VM = np.arange(vocab_size)[:, None] + vocab_size // 2 + np.arange(NUM_WRONG)
    masses_VM = np.tile(TARGET_WEIGHTS, (vocab_size, 1))
    if settings.temperature:
        acceptance_V = _varied(_stretches(settings), settings)
        draft_VM = np.concatenate(
            [
                acceptance_V[:, None] * masses_VM,
                np.tile((1 - acceptance_V[:, None]) / NUM_WRONG, (1, NUM_WRONG)),
            ],
            axis=1,
        )
        draft_places_VM = np.concatenate([ahead_VM, wrong_VM], axis=1)
    else:
        acceptance_V = _agreements(_stretches(settings), settings, generator)
        draft_places_VM, draft_VM = _greedy_draft(acceptance_V, ahead_VM, wrong_VM, generator)
    return MarkovPair(
        target=_model(order_V, ahead_VM, masses_VM, scale),
        draft=_model(order_V, draft_places_VM, draft_VM, scale),
        order_V=order_V,
        acceptance_V=acceptance_V,
    )


def _model(order_V: np.ndarray, places_VM: np.ndarray, masses_VM: np.ndarray, scale: float) -> MarkovModel:
    """``scale``: softmax(logits / scale) gives the masses."""
    vocab_size = len(order_V)
    ids_VM, logits_VM = np.empty(places_VM.shape, np.int64), np.empty(places_VM.shape, np.float32)
    ids_VM[order_V] = order_V[places_VM % vocab_size]
    logits_VM[order_V] = scale * np.maximum(np.log(np.maximum(masses_VM, np.exp(FLOOR))), FLOOR)
    return MarkovModel(torch.from_numpy(ids_VM), torch.from_numpy(logits_VM), scale * FLOOR)


def _stretches(settings: PairSettings) -> np.ndarray:
    """[V]: mean acceptance of the stretch that each place is in."""
    mean = settings.acceptance
    deviation = settings.variation * min(mean, 1 - mean)
    is_hard_V = np.arange(settings.vocab_size) // STRETCH_TOKENS % 2
    return np.asarray(mean + deviation * (1 - 2 * is_hard_V))


def _varied(means_V: np.ndarray, settings: PairSettings) -> np.ndarray:
    """Half as far as possible above and below the stretch's mean, in turn."""
    signs_V = 1 - 2 * (np.arange(settings.vocab_size) % 2)
    return np.asarray(means_V + signs_V * np.minimum(means_V, 1 - means_V) / 2)


def _agreements(means_V: np.ndarray, settings: PairSettings, generator: np.random.Generator) -> np.ndarray:
    """0 or 1 at each place, at random inside a stretch, whose number of ones is its mean, rounded so that the
    numbers add up."""
    agreements_V = np.zeros(settings.vocab_size)
    ends = np.cumsum(means_V)[STRETCH_TOKENS - 1 :: STRETCH_TOKENS].round().astype(int)
    for index, count in enumerate(np.diff(ends, prepend=0)):
        chosen = generator.choice(STRETCH_TOKENS, min(count, STRETCH_TOKENS), replace=False)
        agreements_V[index * STRETCH_TOKENS + chosen] = 1
    return agreements_V


def _greedy_draft(
    agreements_V: np.ndarray, ahead_VM: np.ndarray, wrong_VM: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Places and probabilities [V, M] of the draft's likeliest tokens, the likeliest first.

    It is as certain, and as often nearly right, as a distilled draft is: :data:`RIGHT`, :data:`WRONG`. So
    branches of a block catch as many misses as the planner assumes
    (:func:`specdist.policies.formulas.caught_share`).
    """
    vocab_size = len(agreements_V)
    first_V, ranks_V = np.empty(vocab_size), np.zeros(vocab_size, np.int64)
    deciles = np.linspace(0, 1, len(RIGHT))
    for is_one_V, values in ((agreements_V > 0, RIGHT), (agreements_V == 0, WRONG)):
        first_V[is_one_V] = np.interp(_spread(int(is_one_V.sum()), generator), deciles, values)
    is_wrong_V = agreements_V == 0
    missed_by_W = (1 - _spread(int(is_wrong_V.sum()), generator)) ** (-1 / RANK_EXPONENT) - 1
    ranks_V[is_wrong_V] = np.clip(np.ceil(missed_by_W), 1, NUM_WRONG - 1)
    places_VM = wrong_VM.copy()
    places_VM[np.arange(vocab_size), ranks_V] = ahead_VM[:, 0]
    shares_M = np.r_[SHARES, SHARES[-1] * 0.9 ** np.arange(1, NUM_WRONG - len(SHARES))]
    others_VM = np.minimum((1 - first_V[:, None]) * shares_M, first_V[:, None])
    masses_VM = np.concatenate([first_V[:, None], others_VM], axis=1) * (1 - 1e-3 * np.arange(NUM_WRONG))
    return places_VM, masses_VM / masses_VM.sum(axis=1, keepdims=True)


def _spread(number: int, generator: np.random.Generator) -> np.ndarray:
    """Evenly over [0, 1], in random order."""
    return (generator.permutation(number) + 0.5) / max(1, number)
