"""The checks of test_engine.py; each runs in a process with a pretended device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdist.costs import CostModel, Curve
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
from tests.engine.heads import random_head
from tests.gpu.engine_runs import MAX_DRAFT_TOKENS, MODES, RULES, Pair
from tests.models.families import FAMILIES, noisy_copy, tiny_model

CAP = {"max_draft_tokens": MAX_DRAFT_TOKENS}
COSTS = CostModel(Curve([1, 401], [2000, 2400]), Curve([1, 101], [20, 60]))
WINDOW = {"num_draft_tokens": 3, "min_draft_tokens": 1, "length_bonus": 2.0, "length_rate": 0.5, **CAP}
# Under their thresholds blocks have several lengths on these models.
POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "fixed": lambda: FixedLength(MAX_DRAFT_TOKENS),
    "hf_heuristic": lambda: HfHeuristic(num_draft_tokens=3, **CAP),
    "confidence": lambda: ConfidenceThreshold(stop_probability=0.4, **CAP),
    "svip": lambda: Svip(stop_root_entropy=1.5, **CAP),
    "adaedl": lambda: AdaEdl(
        stop_bound=0.3, stop_bound_step=0.2, stop_bound_momentum=0.5, entropy_factor=0.2,
        target_acceptance=0.6, acceptance_momentum=0.5, **CAP,
    ),
    "gammatune": lambda: GammaTune(**WINDOW),
    "gammatune_plus": lambda: GammaTunePlus(stop_probability=0.4, **WINDOW),
    "goodput": lambda: Goodput(costs=COSTS, is_coupled=False, **CAP),
}  # fmt: skip
HEAD_POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "specdecpp": lambda: SpecDecPlusPlus(stop_threshold=0.7, **CAP),
    "goodput": lambda: Goodput(costs=COSTS, is_coupled=False, reads_head=True, **CAP),
    "sprinter": lambda: Sprinter(verifier_threshold=0.5, **CAP),
}


def check_family(family: str) -> None:
    """All rules in bfloat16, and one in float32. Modes and policies take turns, so that over all families
    every rule meets every mode, and every policy every rule."""
    place = list(FAMILIES).index(family)
    mode = list(MODES.values())[place % len(MODES)]
    for dtype, rules in ((torch.bfloat16, list(RULES)), (torch.float32, ["rejection"])):
        target = tiny_model(family).to(dtype)
        pair = Pair(target, noisy_copy(target), dict(mode))
        for rule in rules:
            number = place * len(RULES) + list(RULES).index(rule)
            pair.check(RULES[rule], list(POLICIES.values())[number % len(POLICIES)])


def check_heads(mode: str) -> None:
    """Of the policies that read one."""
    target = tiny_model("llama", seed=3).bfloat16()
    draft = noisy_copy(target)
    pair = Pair(target, draft, {**MODES[mode], "head": random_head(draft, uses_features=True)})
    pair.check(RULES["top_p"], HEAD_POLICIES["specdecpp"])
    pair.check(RULES["rejection"], HEAD_POLICIES["goodput"])
    # The one that trusts the draft.
    lossy = Pair(target, draft, {**MODES[mode], "head": random_head(draft), "trusts_draft": True})
    lossy.check(RULES["rejection"], HEAD_POLICIES["sprinter"])
