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
# Tokens that only the draft believes in, and where they stand from the last token.
NUM_WRONG = 16
# The logarithm of the probability of all other tokens, at temperature 1.
FLOOR = -30.0
# Draft's probability of its own next token, where it agrees with the target and where it does not.
RIGHT, WRONG = (0.5, 1.0), (0.2, 0.8)


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
        stretch_tokens: length of each; twice this must divide ``vocab_size``.
        temperature: at which the acceptance holds; 0 is greedy.
    """

    vocab_size: int
    acceptance: float
    variation: float = 0.0
    stretch_tokens: int = 32
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
    is_hard_V = np.arange(settings.vocab_size) // settings.stretch_tokens % 2
    return np.asarray(mean + deviation * (1 - 2 * is_hard_V))


def _varied(means_V: np.ndarray, settings: PairSettings) -> np.ndarray:
    """Half as far as possible above and below the stretch's mean, in turn."""
    signs_V = 1 - 2 * (np.arange(settings.vocab_size) % 2)
    return np.asarray(means_V + signs_V * np.minimum(means_V, 1 - means_V) / 2)


def _agreements(means_V: np.ndarray, settings: PairSettings, generator: np.random.Generator) -> np.ndarray:
    """0 or 1 at each place, at random inside a stretch, whose number of ones is its mean, rounded so that the
    numbers add up."""
    agreements_V = np.zeros(settings.vocab_size)
    ends = np.cumsum(means_V)[settings.stretch_tokens - 1 :: settings.stretch_tokens].round().astype(int)
    for index, count in enumerate(np.diff(ends, prepend=0)):
        chosen = generator.choice(settings.stretch_tokens, min(count, settings.stretch_tokens), replace=False)
        agreements_V[index * settings.stretch_tokens + chosen] = 1
    return agreements_V


def _greedy_draft(
    agreements_V: np.ndarray, ahead_VM: np.ndarray, wrong_VM: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Places and probabilities [V, M] of the draft's likeliest tokens, the likeliest first.

    Where it is wrong, the target's token comes as far down as the planner assumes of a distilled draft: among
    the n after the first with probability 1 - (1 + n)^-1/2 (:func:`specdist.theory.formulas.caught_share`).
    """
    vocab_size = len(agreements_V)
    is_right_V = agreements_V > 0
    first_V = np.where(
        is_right_V, generator.uniform(*RIGHT, vocab_size), generator.uniform(*WRONG, vocab_size)
    )
    places_VM = wrong_VM.copy()
    missed_by_V = np.ceil((1 - generator.random(vocab_size)) ** -2 - 1)
    ranks_V = np.where(is_right_V, 0, np.clip(missed_by_V, 1, NUM_WRONG - 1)).astype(int)
    places_VM[np.arange(vocab_size), ranks_V] = ahead_VM[:, 0]
    shares_M = 0.5 ** np.arange(1, NUM_WRONG)
    masses_VM = np.concatenate([first_V[:, None], (1 - first_V[:, None]) * shares_M], axis=1)
    masses_VM = -np.sort(-masses_VM, axis=1) * (1 - 1e-3 * np.arange(NUM_WRONG))
    return places_VM, masses_VM / masses_VM.sum(axis=1, keepdims=True)
