"""SPRINTER's verifier: how often it was right in a traced run, and the predicted number of target calls.

A token x is acceptable if Q(x)/P(x) is at most λ, for which the verifier was trained; an acceptable token
passes with probability t, another with f. SPRINTER's theorems take r acceptable tokens in a row as given.
Here tokens are acceptable independently, with the measured share, so that block lengths are geometric; the
comparison with the run shows how far this holds.

N drafted tokens that have an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specdist.data.stats.shard import Stats
from specdist.job.totals.predictions import Comparison
from specdist.policies.formulas import tokens_per_call


@dataclass(frozen=True, kw_only=True)
class VerifierRates:
    """Shares of drafted tokens.

    Attributes:
        acceptable: Q/P is at most λ.
        true_positive, false_positive: passed tokens among the acceptable ones, and among the others (t, f).
        acceptance: mean of min(1, P/Q), which is 1 - TV(P, Q).
        doubted_acceptance: the same over the tokens that did not pass.
        false_positive_at_one: passed tokens among those with Q > P, which is f for λ = 1.
        passed_excess: mean of pass (1 - min(1, P/Q)), the distance of a lossy run's distribution from P.
    """

    acceptable: float
    true_positive: float
    false_positive: float
    acceptance: float
    doubted_acceptance: float
    false_positive_at_one: float
    passed_excess: float

    @property
    def pass_rate(self) -> float:
        """Share of all tokens that pass."""
        return self.acceptable * self.true_positive + (1 - self.acceptable) * self.false_positive


def verifier_rates(
    acceptances_N: np.ndarray, estimates_N: np.ndarray, *, max_ratio: float, threshold: float
) -> VerifierRates | None:
    """None where a share has no tokens to be of.

    Args:
        acceptances_N: min(1, P/Q). For a ``max_ratio`` λ below 1 they cannot tell what is acceptable, and
            tokens with Q <= P count as such.
        estimates_N: the verifier's; a token passes from ``threshold`` on.
    """
    # The trace has single precision.
    is_acceptable_N = acceptances_N >= 1 / max(1.0, max_ratio) - 1e-6
    passes_N = estimates_N >= threshold
    if is_acceptable_N.all() or not is_acceptable_N.any() or passes_N.all():
        return None
    return VerifierRates(
        acceptable=float(is_acceptable_N.mean()),
        true_positive=float(passes_N[is_acceptable_N].mean()),
        false_positive=float(passes_N[~is_acceptable_N].mean()),
        acceptance=float(acceptances_N.mean()),
        doubted_acceptance=float(acceptances_N[~passes_N].mean()),
        false_positive_at_one=float(passes_N[acceptances_N < 1 - 1e-6].mean()),
        passed_excess=float((passes_N * (1 - acceptances_N)).mean()),
    )


def verifier_figures(
    rates: VerifierRates, stats: Stats, *, max_draft_tokens: int, is_exact: bool
) -> Mapping[str, Comparison]:
    """Predictions of the rates for a synchronous run, beside the run.

    A block continues after every token that passes, so the i-th token is drafted with probability s^(i-1). If
    all tokens are verified, it is kept if it and all before it are accepted; otherwise all are kept except
    the last, which is verified. A token of the target follows in both cases.

    A lossy run's distribution after a prefix is Q pass + (1 - pass) min(P, Q) and a residual, at the distance
    E_Q[pass (1 - min(1, P/Q))] from P: the measured ``distance``. Theorem 1 has f TV(P, Q) for it, with f of
    λ = 1, as if f were the same for every token with Q > P: the predicted one.
    """
    passes, last = rates.pass_rate, max_draft_tokens - 1
    passes_and_accepted = rates.acceptance - (1 - passes) * rates.doubted_acceptance
    verifying = 1 + rates.acceptance * tokens_per_call(passes_and_accepted, last)
    # The token at the cap ends a block whether it passes or not.
    at_cap = passes**last
    num_verified = (1 - at_cap) * rates.doubted_acceptance + at_cap * rates.acceptance
    length = tokens_per_call(passes, last)
    trusting = length + num_verified
    figures = {
        "block_length": Comparison(length, stats.num_block_candidates / stats.num_drafts),
        "tokens_per_call": Comparison(
            verifying if is_exact else trusting, 1 + stats.num_accepted_tokens / stats.num_drafts
        ),
    }
    if not is_exact:
        figures["calls_over_verifying_all"] = Comparison(verifying / trusting, None)
        figures["distance"] = Comparison(
            rates.false_positive_at_one * (1 - rates.acceptance), rates.passed_excess
        )
    return figures
