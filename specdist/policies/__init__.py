"""Length policies by name: how many tokens to draft for each sequence."""

from specdist.policies.base import (
    NUM_FEATURES,
    BatchPolicy,
    BlockPolicy,
    DraftFeatures,
    DraftSequences,
    HeadPolicy,
    LengthPolicy,
    PausingPolicy,
    RoundContext,
    RunPolicy,
    VerifiedBlocks,
    VerifiedTokens,
    WithoutHistory,
    needs_last_estimate,
    reads_head,
)
from specdist.policies.lengths.counted import FixedLength, GammaTune, GammaTunePlus, HfHeuristic
from specdist.policies.lengths.goodput import Goodput
from specdist.policies.lengths.heads import SpecDecPlusPlus, Sprinter
from specdist.policies.lengths.thresholds import AdaEdl, ConfidenceThreshold, Svip
from specdist.policies.options import HeadKind

__all__ = [
    "NUM_FEATURES",
    "AdaEdl",
    "BatchPolicy",
    "BlockPolicy",
    "ConfidenceThreshold",
    "DraftFeatures",
    "DraftSequences",
    "FixedLength",
    "GammaTune",
    "GammaTunePlus",
    "Goodput",
    "HeadKind",
    "HeadPolicy",
    "HfHeuristic",
    "LengthPolicy",
    "PausingPolicy",
    "RoundContext",
    "RunPolicy",
    "SpecDecPlusPlus",
    "Sprinter",
    "Svip",
    "VerifiedBlocks",
    "VerifiedTokens",
    "WithoutHistory",
    "needs_last_estimate",
    "reads_head",
]
