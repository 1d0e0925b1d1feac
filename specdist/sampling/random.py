"""Counter-based random numbers: every number is a pure function of what it decides.

A number is keyed by (seed, row, sample) through the sequence's *stream key* (``keys.py``), and by (position,
misses, purpose) through a counter. So a completion does not depend on which sequences share its batch, on the
shard plan or on a restart, and one number never serves two purposes. The mixer is SplitMix64's finaliser
(Steele, Lea, Flood 2014), a bijection on 64 bits, applied twice with the key between.

N any shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from specdist.sampling.keys import GOLDEN_GAMMA, MULTIPLIER_1, MULTIPLIER_2, signed

Words = TypeVar("Words", Tensor, np.ndarray)
PURPOSE_BITS = 2
MISS_BITS = 30
# 52 bits: the largest number, 1 - 2**-52, times any total mass is strictly below that mass in float64.
UNIFORM_BITS = 52


class Purpose(IntEnum):
    """What a random number decides. Reusing one for another purpose would bias the output silently."""

    DRAFT = 0
    ACCEPT = 1
    NEXT_TOKEN = 2  # the recovered token after a rejection, or the bonus token after a fully accepted block
    COUPLE = 3  # the noise that target and draft share under --acceptance gumbel


@dataclass(frozen=True)
class RandomKeys:
    """Where N random numbers belong, on the host.

    Attributes:
        stream_keys_N: int64, of each sequence; see :func:`specdist.sampling.keys.stream_key`.
        positions_N: int64 position in the sequence of the token that the number decides, below 2**32.
        num_misses_N: int64, how often what the sequence had drafted was dropped before, below 2**30: a
            position that is drafted again gets fresh numbers.
    """

    stream_keys_N: np.ndarray
    positions_N: np.ndarray
    num_misses_N: np.ndarray

    def uniforms(self, purpose: Purpose) -> Tensor:
        """float64 [N] in [0, 1), on the CPU."""
        # Of few numbers, an operation of torch takes several times as long.
        words_N = hash_words(self.stream_keys_N, self.positions_N, self.num_misses_N, purpose)
        return torch.from_numpy(_shift_right(words_N, 64 - UNIFORM_BITS) * 2.0**-UNIFORM_BITS)


def _shift_right(words_N: Words, bits: int) -> Words:
    return (words_N >> bits) & ((1 << (64 - bits)) - 1)  # int64's own shift copies the sign


def mix(words_N: Words) -> Words:
    """SplitMix64's finaliser."""
    words_N = (words_N ^ _shift_right(words_N, 30)) * signed(MULTIPLIER_1)
    words_N = (words_N ^ _shift_right(words_N, 27)) * signed(MULTIPLIER_2)
    return words_N ^ _shift_right(words_N, 31)


def uniforms(stream_keys_N: Tensor, positions_N: Tensor, num_misses_N: Tensor, purpose: Purpose) -> Tensor:
    """float64 numbers in [0, 1), keyed like the bits of :func:`hash_words`."""
    words_N = hash_words(stream_keys_N, positions_N, num_misses_N, purpose)
    return _shift_right(words_N, 64 - UNIFORM_BITS).to(torch.float64) * 2.0**-UNIFORM_BITS


def open_unit_interval(words_N: Tensor) -> Tensor:
    """float64 numbers in (0, 1), of which a logarithm can be taken, from the words' high bits."""
    return (_shift_right(words_N, 64 - UNIFORM_BITS).to(torch.float64) + 0.5) * 2.0**-UNIFORM_BITS


def hash_words(stream_keys_N: Words, positions_N: Words, num_misses_N: Words, purpose: Purpose) -> Words:
    """64 random bits as int64, one per (stream, position, misses), for one purpose.

    Args:
        stream_keys_N: int64, from :func:`specdist.sampling.keys.stream_key`; broadcasts with the others.
        positions_N: int64 position in the sequence of the token that the number decides, below 2**32.
        num_misses_N: int64, below 2**30: how often what the sequence had drafted was dropped so far, so that
            a position that is drafted again gets a fresh number.
    """
    counters_N = (positions_N << (MISS_BITS + PURPOSE_BITS)) | (num_misses_N << PURPOSE_BITS) | int(purpose)
    return mix(mix(counters_N * signed(GOLDEN_GAMMA) + stream_keys_N) ^ stream_keys_N)
