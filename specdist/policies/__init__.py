"""Length policies by name: how many tokens to draft for each row."""

from specdist.policies.adaedl import AdaEdl
from specdist.policies.base import (
    BatchPolicy,
    DraftedRows,
    DraftFeatures,
    HeadPolicy,
    JudgedTokens,
    LengthPolicy,
    RoundContext,
    VerifiedBlocks,
    WithoutHistory,
    reads_head,
)
from specdist.policies.confidence import ConfidenceThreshold
from specdist.policies.fixed import FixedLength
from specdist.policies.gammatune import GammaTune
from specdist.policies.gammatune_plus import GammaTunePlus
from specdist.policies.goodput import Goodput
from specdist.policies.hf_heuristic import HfHeuristic
from specdist.policies.specdecpp import SpecDecPlusPlus
from specdist.policies.sprinter import Sprinter
from specdist.policies.svip import Svip
from specdist.policy_options import HeadKind

__all__ = [
    "AdaEdl",
    "BatchPolicy",
    "ConfidenceThreshold",
    "DraftFeatures",
    "DraftedRows",
    "FixedLength",
    "GammaTune",
    "GammaTunePlus",
    "Goodput",
    "HeadKind",
    "HeadPolicy",
    "HfHeuristic",
    "JudgedTokens",
    "LengthPolicy",
    "RoundContext",
    "SpecDecPlusPlus",
    "Sprinter",
    "Svip",
    "VerifiedBlocks",
    "WithoutHistory",
    "reads_head",
]
