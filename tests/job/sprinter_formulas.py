"""SPRINTER's theorems: what the engine and the policy are compared with.

The papers' fractions (1 - t^r) / (1 - t) are written as the sums that they stand for: t may be 1, f may not.
"""

from __future__ import annotations


def sprinter_run_length(*, num_acceptable: int, true_positive: float, false_positive: float) -> float:
    """Expected tokens in a row that the verifier lets pass, (t - t^r)/(1 - t) + t^r/(1 - f) (SPRINTER,
    Theorem 2).

    The next r = ``num_acceptable`` tokens of the draft are acceptable (Q <= P), those after them are not.
    The verifier lets an acceptable one pass with probability t and another one with f, independently.
    """
    num_steps = sprinter_stopping_time(
        num_acceptable=num_acceptable,
        true_positive=true_positive,
        false_positive=false_positive,
        t_draft=1.0,
    )
    return num_steps - 1


def sprinter_stopping_time(
    *, num_acceptable: int, true_positive: float, false_positive: float, t_draft: float
) -> float:
    """Expected time of the draft's steps up to the verifier's first doubt, that token's included:
    t_draft ((1 - t^r)/(1 - t) + t^r/(1 - f)) (SPRINTER, Theorem 3), as :func:`sprinter_run_length` has it."""
    t, f, r = true_positive, false_positive, num_acceptable
    return t_draft * (sum(t**k for k in range(r)) + t**r / (1 - f))


def sprinter_acceptance(false_positive: float, distance: float) -> float:
    """The share of draft tokens that are kept, 1 - (1 - f) TV(P, Q) (SPRINTER, Theorem 7)."""
    return 1 - (1 - false_positive) * distance
