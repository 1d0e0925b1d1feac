"""Goodput with costs and acceptances that are given, and what it is asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdist.policies import DraftFeatures, DraftSequences, Goodput, RoundContext
from specdist.policies.costs import CostModel, Curve
from tests.policies.rows import sequences

CAP = 6


def flat_costs(*, target: int, draft: int, per_token: int = 0) -> CostModel:
    return CostModel(Curve([1, 101], [target, target + 100 * per_token]), Curve([1], [draft]))


def features_of(top: list[float] | np.ndarray) -> DraftFeatures:
    likely = np.array(top, float)
    return DraftFeatures(entropies=3 * (1 - likely), probabilities=likely, top_probabilities=likely)


def question(
    num_rows: int,
    num_drafted: int,
    features: DraftFeatures | None = None,
    *,
    num_prompt_tokens: int = 0,
    histories_RH: np.ndarray | None = None,
    **of_round: Any,
) -> DraftSequences:
    return sequences(
        np.zeros((num_rows, 2)) if histories_RH is None else histories_RH,
        num_drafted,
        None if features is None else DraftFeatures(*features.stacked[:, None]),
        num_pass_tokens=num_rows + num_prompt_tokens,
        **of_round,
    )


def a_pass(num_tokens: int) -> RoundContext:
    return RoundContext(num_rows=num_tokens, num_pass_tokens=num_tokens, is_asynchronous=False)


def new_goodput(costs: CostModel) -> Goodput:
    return Goodput(max_draft_tokens=CAP, costs=costs, is_coupled=True)


def goodput(costs: CostModel, *, acceptance: float = 0.7) -> Goodput:
    """It has seen so many tokens that this acceptance is all that counts, but what a token's features say."""
    policy = new_goodput(costs)
    policy._forecast._prior_tokens, policy._forecast._seen = 0.0, np.array([400 * acceptance, 400.0])
    return policy


def drafted_length(policy: Goodput, top: float, *, num_rows: int = 1, is_asynchronous: bool = False) -> int:
    """How long a block of every row gets whose tokens all look alike."""
    length = 0
    while all(
        goes_on(
            policy,
            num_rows,
            length,
            features_of([top] * num_rows) if length else None,
            is_asynchronous=is_asynchronous,
        )
    ):
        length += 1
    return length


def goes_on(policy: Goodput, num_rows: int, num_drafted: int, *given: Any, **options: Any) -> list[bool]:
    """Whether each row's block is to be longer; the arguments are those of :func:`question`."""
    return (policy.wants(question(num_rows, num_drafted, *given, **options)) > num_drafted).tolist()
