"""The length policy that the options name."""

from __future__ import annotations

from typing import Any

from specdist.config.generate import GenerateConfig
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
from specdist.policies.costs import CostModel
from specdist.policies.options import TARGET_ONLY, PolicyChoice, needs_costs

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
    is_coupled = config.temperature == 0 or config.acceptance == "gumbel"
    choice = PolicyChoice(config.policy, config.policy_options, reads_head=config.head is not None)
    return build_policy(choice, costs, is_coupled=is_coupled)


def build_policy(choice: PolicyChoice, costs: CostModel | None, *, is_coupled: bool) -> LengthPolicy:
    """A new one, which has learned nothing. ``is_coupled``: target and draft draw alike (greedy, gumbel)."""
    if choice.policy == TARGET_ONLY:
        return FixedLength(0)
    if needs_costs(choice.policy):
        assert costs is not None
        return Goodput(
            max_draft_tokens=choice.max_draft_tokens,
            costs=costs,
            is_coupled=is_coupled,
            reads_head=choice.reads_head,
        )
    policy: LengthPolicy = POLICIES[choice.policy](**choice.options)
    return policy


def uses_features(policy: str) -> bool:
    """Whether the draft has to work out the features of every token."""
    return policy != TARGET_ONLY and bool(POLICIES[policy].uses_features)
