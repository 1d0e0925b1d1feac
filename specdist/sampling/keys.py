"""The key of a completion's random stream. Pure Python: the scheduler, which has no tensors, makes the keys.

The mixer is SplitMix64's finaliser (Steele, Lea, Flood 2014), a bijection on 64 bits.
"""

from __future__ import annotations

WORD = 2**64
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB


def signed(word: int) -> int:
    """The 64-bit word as the signed integer that an int64 tensor holds."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


def stream_key(seed: int, row_id: int, sample_index: int, turn: int = 0, attempt: int = 0) -> int:
    """The key of one completion's random stream, as a signed 64-bit integer. Every turn of a conversation has
    one of its own: it may have the positions of another, whose thinking a chat template has left out. So has
    every attempt at a row after the first."""
    key = _mix(seed + GOLDEN_GAMMA)
    later = (turn, attempt) if attempt else (turn,) if turn else ()
    for part in (row_id, sample_index, *later):
        key = _mix((key ^ part) + GOLDEN_GAMMA)
    return signed(key)


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * MULTIPLIER_1) % WORD
    word = ((word ^ (word >> 27)) * MULTIPLIER_2) % WORD
    return word ^ (word >> 31)
