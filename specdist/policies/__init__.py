"""Length policies by name: how many tokens to draft for each sequence."""

from specdist.policies.base import (
    NUM_FEATURES,
    BatchPolicy,
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
from specdist.policies.lengths.adaedl import AdaEdl
from specdist.policies.lengths.confidence import ConfidenceThreshold
from specdist.policies.lengths.fixed import FixedLength
from specdist.policies.lengths.gammatune import GammaTune
from specdist.policies.lengths.gammatune_plus import GammaTunePlus
from specdist.policies.lengths.goodput import Goodput
from specdist.policies.lengths.hf_heuristic import HfHeuristic
from specdist.policies.lengths.specdecpp import SpecDecPlusPlus
from specdist.policies.lengths.sprinter import Sprinter
from specdist.policies.lengths.svip import Svip
from specdist.policies.options import HeadKind

__all__ = [
    "NUM_FEATURES",
    "AdaEdl",
    "BatchPolicy",
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
