"""From logits to the distribution that a token is drawn from, the same for target and draft; and the
rejection rule: which candidates are accepted, and what follows them.

Logits → distribution → draw → accept are four separate steps. Greedy is the same path with one-hot
distributions. Logits that are NaN or infinite need no check of their own: the draw is ``NOT_FINITE``, which
no candidate equals, and the probability of a token is 0 or NaN, so none is accepted.

P is the target's distribution at a position, Q the one that the draft drew its candidate from, both after
temperature, top-k and top-p (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2):

1. A candidate y is accepted if u < P(y) / Q(y). The first rejection ends its block.
2. A rejected candidate is replaced by the *recovered* token, drawn from norm(max(0, P - Q)).
3. A fully accepted block is followed by the *bonus* token, drawn from P.

Every emitted token then follows P, whatever Q is. The two steps may run in two processes: verification needs
one number of each distribution per candidate, the next token the whole of both, at one position per sequence.
Each takes random numbers of its own; sharing them would bias the output silently. Greedy decoding and gumbel
coupling are the same rule on one-hot distributions: the next token is then known without sampling. A draft
that was certain of its candidate has a Q with all mass on it: y is accepted with probability P(y), and
norm(max(0, P - Q)) is P without y.

N distributions, V vocabulary, M of the N. C candidates of all sequences, one after the other; R sequences; W
of them whose next token is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from specdist.sampling.device_kernels import sampling_kernels
from specdist.sampling.processing.row_filters import RowFilters, plain_probabilities
from specdist.sampling.processing.row_table import Processing
from specdist.sampling.random import Purpose, RandomKeys
from specdist.sampling.uploads import upload

# The placeholder of a token id where the logits are not finite; other placeholders are -1; and those of next
# tokens that are not drawn yet, the w-th FIRST_NEXT - w.
NOT_FINITE, FIRST_NEXT = -2, -3


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Temperature (0 = greedy), top-k (0 = all) and top-p (1 = all), applied in this order.

    ``is_coupled``: target and draft draw with the same noise (``--acceptance gumbel``). ``processing``: what
    else happens to logits; every position then has numbers of its own (:class:`RowFilters`), and the
    temperature here is the highest of all rows. ``num_logprobs``: the log-probabilities of all
    emitted tokens are wanted, and of so many likeliest ones beside each; None: they are not;
    ``num_prompt_logprobs``: the same of the prompts' tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    is_coupled: bool = False
    processing: Processing | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.num_logprobs is not None or self.num_prompt_logprobs is not None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_random(self) -> bool:
        """Each draw from a distribution needs a random number of its own."""
        return not self.is_greedy and not self.is_coupled


@dataclass(frozen=True)
class OneHot:
    """N distributions with all their mass on one token each."""

    token_ids_N: Tensor

    @property
    def device(self) -> torch.device:
        return self.token_ids_N.device

    @staticmethod
    def of_largest(scores_NV: Tensor) -> OneHot:
        """One-hot distributions at the largest score of each, the lowest id of equal ones. NaN counts as the
        largest."""
        largest_N1 = scores_NV.argmax(dim=1, keepdim=True)
        is_finite_N1 = scores_NV.gather(1, largest_N1).isfinite()
        return OneHot(largest_N1.where(is_finite_N1, NOT_FINITE)[:, 0])

    def select(self, index_M: np.ndarray) -> OneHot:
        return OneHot(self.token_ids_N[upload(self.device, index_M)[0]])

    def probabilities_of(self, token_ids_N: Tensor) -> Tensor:
        """float64 probability of one token per distribution."""
        return (token_ids_N == self.token_ids_N).to(torch.float64)

    def draw(self, uniforms_N: Tensor | None) -> Tensor:
        """int64 token ids; random numbers are not used."""
        del uniforms_N
        return self.token_ids_N


@dataclass(frozen=True)
class Dense:
    """N distributions as rows of a float matrix, or the lines ``lines_N`` of one, which are copied when they
    are needed by themselves; a row sums to 1 up to rounding."""

    matrix_MV: Tensor
    lines_N: np.ndarray | None = None

    @cached_property
    def probabilities_NV(self) -> Tensor:
        lines = slice(None) if self.lines_N is None else upload(self.device, self.lines_N)[0]
        return self.matrix_MV[lines]

    @property
    def device(self) -> torch.device:
        return self.matrix_MV.device

    def select(self, index_M: np.ndarray) -> Dense:
        return Dense(self.matrix_MV, index_M if self.lines_N is None else self.lines_N[index_M])

    def probabilities_at(self, index_M: Tensor, token_ids_M: Tensor) -> Tensor:
        """float64 probability of each token in the distribution at its index."""
        return self.probabilities_NV[index_M, token_ids_M].to(torch.float64)

    def probabilities_of(self, token_ids_N: Tensor) -> Tensor:
        """float64 probability of one token per distribution."""
        return self.probabilities_NV.gather(1, token_ids_N[:, None])[:, 0].to(torch.float64)

    def draw(self, uniforms_N: Tensor | None) -> Tensor:
        """int64 token ids by the inverse of the cumulative distribution, summed in float64.

        The first token whose cumulative mass exceeds u × total is one with positive probability.
        """
        assert uniforms_N is not None
        kernels = sampling_kernels(self.probabilities_NV)
        if kernels is not None:
            drawn_N = kernels.draw(self.probabilities_NV, uniforms_N, not_finite=NOT_FINITE)
            assert isinstance(drawn_N, Tensor)
            return drawn_N
        cumulative_NV = self.probabilities_NV.cumsum(dim=1, dtype=torch.float64)
        thresholds_N1 = uniforms_N[:, None] * cumulative_NV[:, -1:]
        drawn_N1 = torch.searchsorted(cumulative_NV, thresholds_N1, right=True)
        return drawn_N1.where(cumulative_NV[:, -1:] > 0, NOT_FINITE)[:, 0]


Distributions: TypeAlias = OneHot | Dense


def distributions_from_logits(
    logits_NV: Tensor, settings: SamplingSettings, filters: RowFilters | None = None
) -> Distributions:
    """Temperature, then top-k, then top-p, as transformers' logits processors define them; of equal scores at
    the edge of a filter all are kept. ``filters``: of processed logits, instead of the settings' numbers."""
    if settings.is_greedy:
        return OneHot.of_largest(logits_NV)
    if filters is not None:
        return Dense(filters.probabilities(logits_NV))
    kernels = sampling_kernels(logits_NV)
    process = plain_probabilities if kernels is None else kernels.processed_probabilities
    return Dense(
        process(logits_NV, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    )


def accepted(target_C: np.ndarray, draft_C: np.ndarray, uniforms_C: np.ndarray) -> np.ndarray:
    """bool [C]: which candidates are accepted, each decided independently: u < P(y) / Q(y), strictly and
    without dividing. P = 0 and NaN are never accepted.

    Args:
        target_C: float64, P(y) of each candidate at its position.
        draft_C: float64, Q(y), the probability with which the draft drew it; positive.
        uniforms_C: of the candidates' own positions, for acceptance.
    """
    is_accepted_C: np.ndarray = uniforms_C * draft_C < target_C
    return is_accepted_C


def acceptance_probabilities(target_C: np.ndarray, draft_C: np.ndarray) -> np.ndarray:
    """min(1, P(y) / Q(y)): how likely a candidate is to be accepted; 0 where Q and P are 0."""
    return np.minimum(target_C / np.maximum(draft_C, np.finfo(np.float64).tiny), 1.0)


def count_accepted(accepted_C: np.ndarray, lengths_R: np.ndarray) -> np.ndarray:
    """int64 [R]: the accepted candidates of each block before its first rejection; lengths sum to C."""
    ends_R = lengths_R.cumsum()
    starts_R = ends_R - lengths_R
    # The first rejection from each start on, of whichever block.
    rejections = np.append((~accepted_C).nonzero()[0], len(accepted_C))
    first_R = rejections[rejections.searchsorted(starts_R)]
    return np.asarray(np.minimum(first_R, ends_R) - starts_R)


def sample_next_tokens(target_W: Dense, keys_W: RandomKeys, draft_W: Dense | None = None) -> Tensor:
    """int64 [W], on the target's device: the recovered or bonus token of each sequence.

    Args:
        keys_W: of the positions that the tokens will have.
        draft_W: Q where a candidate was rejected there, and zeros where none was: the residual of P and
            zeros is P itself, from which the bonus token is drawn. None: no sequence had a rejection.
    """
    distributions_W = target_W if draft_W is None else recovered_distributions(target_W, draft_W)
    return distributions_W.draw(*upload(target_W.device, keys_W.uniforms(Purpose.NEXT_TOKEN)))


@dataclass
class NextDraws:
    """Next tokens of these slots that are still to be drawn, see :func:`sample_next_tokens`. ``scores_MV``: Q
    of all, or with ``lines_W`` of those where a candidate was rejected; the others' are -1."""

    target_W: Dense
    keys_W: RandomKeys
    scores_MV: Tensor
    lines_W: np.ndarray | None
    slots_W: np.ndarray

    @cached_property
    def token_ids_W(self) -> Tensor:
        """Drawn by themselves, if no run of a draft has done it."""
        draft_WV = self.scores_MV
        if self.lines_W is not None:
            (lines_W,) = upload(self.target_W.device, self.lines_W)
            draft_WV = draft_WV[lines_W.clamp(min=0)].where(lines_W[:, None] >= 0, 0.0)
        return sample_next_tokens(self.target_W, self.keys_W, Dense(draft_WV))


def with_next_tokens(token_ids_T: Tensor, drawn_W: Tensor) -> Tensor:
    """Token ids for placeholders. Where the logits were not finite, any will do: nothing is kept."""
    drawn_T = drawn_W[(FIRST_NEXT - token_ids_T).clamp(min=0)].clamp(min=0)
    return token_ids_T.where(token_ids_T > FIRST_NEXT, drawn_T)


def recovered_distributions(target_W: Dense, draft_W: Dense) -> Dense:
    """norm(max(0, P - Q)), of processed distributions, and never filtered again.

    Where rounding leaves no mass (P and Q are equal) P itself: a rejection there has probability zero.
    """
    mass_WV = (target_W.probabilities_NV - draft_W.probabilities_NV).clamp_(min=0)
    total_W1 = mass_WV.sum(dim=1, keepdim=True)
    return Dense(torch.where(total_W1 > 0, mass_WV / total_W1, target_W.probabilities_NV))
