"""The length policy that the options name."""

from __future__ import annotations

from typing import Any

from specdist.config import GenerateConfig
from specdist.costs import CostModel
from specdist.policies import (
    AdaEdl,
    ConfidenceThreshold,
    FixedLength,
    GammaTune,
    GammaTunePlus,
    Goodput,
    HfHeuristic,
    LengthPolicy,
    SpecDecPlusPlus,
    Sprinter,
    Svip,
)

# Each takes its options by their names.
POLICIES: dict[str, Any] = {
    "fixed": FixedLength,
    "hf_heuristic": HfHeuristic,
    "confidence": ConfidenceThreshold,
    "svip": Svip,
    "adaedl": AdaEdl,
    "gammatune": GammaTune,
    "gammatune_plus": GammaTunePlus,
    "specdecpp": SpecDecPlusPlus,
    "sprinter": Sprinter,
    "goodput": Goodput,
}


def make_policy(config: GenerateConfig, costs: CostModel | None) -> LengthPolicy:
    """The run's policy; one that never drafts for a target alone. ``costs`` where it is led by them."""
    if not config.uses_draft:
        return FixedLength(0)
    if config.policy == "goodput":
        assert costs is not None
        is_coupled = config.temperature == 0 or config.acceptance == "gumbel"
        return Goodput(max_draft_tokens=config.block_tokens - 1, costs=costs, is_coupled=is_coupled)
    policy: LengthPolicy = POLICIES[config.policy](**config.policy_options)
    return policy


def uses_features(config: GenerateConfig) -> bool:
    """Whether the draft has to work out the features of every token."""
    return config.is_traced or bool(config.uses_draft and POLICIES[config.policy].uses_features)
