"""The length policy that the options name."""

from __future__ import annotations

from collections.abc import Callable

from specdist.config import GenerateConfig
from specdist.policies import (
    AdaEdl,
    ConfidenceThreshold,
    FixedLength,
    GammaTune,
    GammaTunePlus,
    HfHeuristic,
    LengthPolicy,
    Svip,
)

# Each takes its options by their names.
POLICIES: dict[str, Callable[..., LengthPolicy]] = {
    "fixed": FixedLength,
    "hf_heuristic": HfHeuristic,
    "confidence": ConfidenceThreshold,
    "svip": Svip,
    "adaedl": AdaEdl,
    "gammatune": GammaTune,
    "gammatune_plus": GammaTunePlus,
}


def make_policy(config: GenerateConfig) -> LengthPolicy:
    """The run's policy; one that never drafts for a target alone."""
    if not config.uses_draft:
        return FixedLength(0)
    return POLICIES[config.policy](**config.policy_options)
