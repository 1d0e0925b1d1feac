"""The length policies on the tiny models of these tests."""

from __future__ import annotations

from collections.abc import Callable

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
from specdist.policies.costs import CostModel, Curve

COSTS = CostModel(Curve([1, 401], [2000, 2400]), Curve([1, 101], [20, 60]))
READS_HEAD = ("specdecpp", "goodput+head", "sprinter")


def policies(cap: int, *, first_length: int = 5) -> dict[str, Callable[[], LengthPolicy]]:
    """Every policy, with thresholds at which blocks of the tiny models have several lengths.

    ``first_length``: of ``hf_heuristic``; at most ``cap``.
    """
    most = {"max_draft_tokens": cap}
    window = {"num_draft_tokens": 3, "min_draft_tokens": 1, "length_bonus": 2.0, "length_rate": 0.5, **most}
    return {
        "fixed": lambda: FixedLength(cap),
        "hf_heuristic": lambda: HfHeuristic(num_draft_tokens=min(first_length, cap), **most),
        "confidence": lambda: ConfidenceThreshold(stop_probability=0.4, **most),
        "svip": lambda: Svip(stop_root_entropy=1.5, **most),
        "adaedl": lambda: AdaEdl(
            stop_bound=0.3, stop_bound_step=0.2, stop_bound_momentum=0.5, entropy_factor=0.2,
            target_acceptance=0.6, acceptance_momentum=0.5, **most,
        ),
        "gammatune": lambda: GammaTune(**window),
        "gammatune_plus": lambda: GammaTunePlus(stop_probability=0.4, **window),
        "goodput": lambda: Goodput(costs=COSTS, is_coupled=False, **most),
        "specdecpp": lambda: SpecDecPlusPlus(stop_threshold=0.7, **most),
        "goodput+head": lambda: Goodput(costs=COSTS, is_coupled=False, reads_head=True, **most),
        "sprinter": lambda: Sprinter(verifier_threshold=0.5, **most),
    }  # fmt: skip
