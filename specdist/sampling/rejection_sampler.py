"""The rejection sampler of speculative decoding: verify candidates, then sample the recovered or bonus token.

P is the target's distribution at a position, Q the one that the draft drew its candidate from, both after
temperature, top-k and top-p (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2):

1. A candidate y is accepted if u < P(y) / Q(y). The first rejection ends its block.
2. A rejected candidate is replaced by the *recovered* token, drawn from norm(max(0, P - Q)).
3. A fully accepted block is followed by the *bonus* token, drawn from P.

Every emitted token then follows P, whatever Q is. The two steps may run in two processes: verification needs
one number of each distribution per candidate, the next token the whole of both, at one position per sequence.
Each takes random numbers of its own; sharing them would bias the output silently. Greedy decoding and gumbel
coupling are the same rule on one-hot distributions: the next token is then known without sampling.

C candidates of all sequences, one after the other; R sequences; W of them whose next token is sampled.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from specdist.sampling.distributions import Dense, Distributions, OneHot
from specdist.sampling.random import Purpose, RandomKeys
from specdist.sampling.uploads import upload

Numbers = TypeVar("Numbers", Tensor, np.ndarray)


def verify_candidates(target_C: Tensor, draft_C: Tensor, keys_C: RandomKeys) -> Tensor:
    """bool [C]: which candidates are accepted, each decided independently.

    Args:
        target_C: float64, P(y) of each candidate at its position, on the CPU.
        draft_C: float64, Q(y), the probability with which the draft drew it; positive.
        keys_C: of the candidates' own positions.
    """
    return accepted(target_C, draft_C, keys_C.uniforms(Purpose.ACCEPT))


def accepted(target_C: Numbers, draft_C: Numbers, uniforms_C: Numbers) -> Numbers:
    """u < P(y) / Q(y), strictly (P = 0 is never accepted) and without dividing. NaN is never accepted."""
    return uniforms_C * draft_C < target_C


def acceptance_probabilities(target_C: Tensor, draft_C: Tensor) -> Tensor:
    """min(1, P(y) / Q(y)): how likely :func:`verify_candidates` is to accept; 0 where Q and P are 0."""
    tiny = torch.finfo(torch.float64).tiny
    return (target_C / draft_C.clamp(min=tiny)).clamp(max=1.0)


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


def recovered_distributions(target_W: Dense, draft_W: Dense) -> Dense:
    """norm(max(0, P - Q)), of processed distributions, and never filtered again.

    Where rounding leaves no mass (P and Q are equal) P itself: a rejection there has probability zero.
    """
    mass_WV = (target_W.probabilities_NV - draft_W.probabilities_NV).clamp_(min=0)
    total_W1 = mass_WV.sum(dim=1, keepdim=True)
    return Dense(torch.where(total_W1 > 0, mass_WV / total_W1, target_W.probabilities_NV))


def known_next_tokens(target_W: Distributions) -> Tensor | None:
    """int64 [W] where the distributions are one-hot: accepted or not, the next token is the target's."""
    return target_W.token_ids_N if isinstance(target_W, OneHot) else None
