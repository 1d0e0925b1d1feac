"""Length policies by name: how many tokens to draft for each sequence."""

from specdist.policies.adaedl import AdaEdl
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
from specdist.policies.confidence import ConfidenceThreshold
from specdist.policies.fixed import FixedLength
from specdist.policies.gammatune import GammaTune
from specdist.policies.gammatune_plus import GammaTunePlus
from specdist.policies.goodput import Goodput
from specdist.policies.hf_heuristic import HfHeuristic
from specdist.policies.options import HeadKind
from specdist.policies.specdecpp import SpecDecPlusPlus
from specdist.policies.sprinter import Sprinter
from specdist.policies.svip import Svip

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
