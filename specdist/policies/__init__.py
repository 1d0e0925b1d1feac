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
from specdist.policies.lengths.counted import FixedLength, GammaTune, GammaTunePlus, HfHeuristic
from specdist.policies.lengths.goodput import Goodput
from specdist.policies.lengths.heads import SpecDecPlusPlus, Sprinter
from specdist.policies.lengths.thresholds import AdaEdl, ConfidenceThreshold, Svip

__all__ = [
    "NUM_FEATURES",
    "AdaEdl",
    "ConfidenceThreshold",
    "DraftFeatures",
    "DraftSequences",
    "FixedLength",
    "GammaTune",
    "GammaTunePlus",
    "Goodput",
    "HeadKind",
    "HfHeuristic",
    "LengthPolicy",
    "PutOff",
    "RoundContext",
    "SpecDecPlusPlus",
    "Sprinter",
    "Svip",
    "VerifiedBlocks",
    "VerifiedTokens",
]
