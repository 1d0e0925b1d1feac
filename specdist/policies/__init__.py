"""Length policies by name: how many tokens to draft for each row."""

from specdist.policies.adaedl import AdaEdl
from specdist.policies.base import DraftedRows, DraftFeatures, LengthPolicy, VerifiedBlocks, WithoutHistory
from specdist.policies.confidence import ConfidenceThreshold
from specdist.policies.fixed import FixedLength
from specdist.policies.gammatune import GammaTune
from specdist.policies.gammatune_plus import GammaTunePlus
from specdist.policies.hf_heuristic import HfHeuristic
from specdist.policies.svip import Svip

__all__ = [
    "AdaEdl",
    "ConfidenceThreshold",
    "DraftFeatures",
    "DraftedRows",
    "FixedLength",
    "GammaTune",
    "GammaTunePlus",
    "HfHeuristic",
    "LengthPolicy",
    "Svip",
    "VerifiedBlocks",
    "WithoutHistory",
]
