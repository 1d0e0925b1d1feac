"""Drafter-invariant sampling: target and draft draw with the same noise (Daliri, Musco, Suresh 2024).

The draw argmax(log P + G), with Gumbel noise G, is the race argmax(P / E), with exponential waiting times
E = exp(-G). The noise is keyed by (stream, position) alone, so the target's draw at a position is the same
whatever was drafted; where the draft's draw is the same token, it is accepted. The probability of that is at
least (1 - TV) / (1 + TV), with TV the total variation distance of the two distributions.

N positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdist.sampling.device_kernels import sampling_kernels
from specdist.sampling.distributions import (
    NOT_FINITE,
    Dense,
    Distributions,
    OneHot,
    SamplingSettings,
    distributions_from_logits,
)
from specdist.sampling.keys import GOLDEN_GAMMA, signed
from specdist.sampling.processing.row_filters import RowFilters
from specdist.sampling.random import Purpose, hash_words, mix, open_unit_interval
from specdist.sampling.uploads import upload


def coupled_scores(distributions: Dense, stream_keys_N: Tensor, positions_N: Tensor) -> Tensor:
    """log P + G [N, V]: the token with the largest score is drawn.

    Args:
        stream_keys_N, positions_N: int64, on the host or on the distributions' device; the position is the
            drawn token's own.
    """
    probabilities_NV = distributions.probabilities_NV
    ids = range(probabilities_NV.shape[1])
    waiting_NV = waiting_times(stream_keys_N, positions_N, ids, probabilities_NV.device)
    return torch.log(probabilities_NV / waiting_NV)


def coupled_draws(distributions: Dense, stream_keys_N: Tensor, positions_N: Tensor) -> OneHot:
    """Each distribution's draw, as a one-hot distribution; the rest of the round is then as in greedy
    decoding."""
    probabilities_NV = distributions.probabilities_NV
    kernels = sampling_kernels(probabilities_NV)
    if kernels is None:
        return OneHot.of_largest(coupled_scores(distributions, stream_keys_N, positions_N))
    words_N = _noise_words(stream_keys_N, positions_N, probabilities_NV.device)
    return OneHot(kernels.race(probabilities_NV, words_N, not_finite=NOT_FINITE))


def waiting_times(stream_keys_N: Tensor, positions_N: Tensor, ids: range, device: torch.device) -> Tensor:
    """[N, V] float64 exponential waiting times of these token ids, positive; an id's time does not depend on
    the other ids."""
    return waiting_times_of(_noise_words(stream_keys_N, positions_N, device), ids)


def _noise_words(stream_keys_N: Tensor, positions_N: Tensor, device: torch.device) -> Tensor:
    words_N = hash_words(stream_keys_N, positions_N, torch.zeros_like(positions_N), Purpose.COUPLE)
    return words_N if words_N.device == device else upload(device, words_N)[0]


def waiting_times_of(words_N: Tensor, ids: range) -> Tensor:
    """A position's word seeds a SplitMix64 stream, from which every token id takes its own number."""
    steps_V = torch.arange(ids.start + 1, ids.stop + 1, device=words_N.device) * signed(GOLDEN_GAMMA)
    return -torch.log(open_unit_interval(mix(words_N[:, None] + steps_V)))


def next_token_distributions(
    logits_NV: Tensor,
    settings: SamplingSettings,
    stream_keys_N: Tensor,
    positions_N: Tensor,
    filters: RowFilters | None = None,
) -> Distributions:
    """The distribution of the token at each position; with coupled draws, the draw itself as a one-hot
    distribution.

    Greedy is the coupled draw without noise: in both the distribution is one-hot, a candidate is accepted if
    it is the target's token, and the recovered token is the target's.
    """
    distributions = distributions_from_logits(logits_NV, settings, filters)
    if settings.is_coupled and isinstance(distributions, Dense):
        return coupled_draws(distributions, stream_keys_N, positions_N)
    return distributions
