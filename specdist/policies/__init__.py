"""Length policies by name: how many tokens to draft for each sequence."""

from specdist.policies.base import (
    NUM_FEATURES,
    DraftFeatures,
    DraftSequences,
    HeadKind,
    LengthPolicy,
    PutOff,
    RoundContext,
    VerifiedBlocks,
    VerifiedTokens,
)
from specdist.policies.lengths.counted import FixedLength
from specdist.policies.lengths.goodput import Goodput

__all__ = [
    "NUM_FEATURES",
    "DraftFeatures",
    "DraftSequences",
    "FixedLength",
    "Goodput",
    "HeadKind",
    "LengthPolicy",
    "PutOff",
    "RoundContext",
    "VerifiedBlocks",
    "VerifiedTokens",
]
