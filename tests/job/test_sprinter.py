"""What is made of a verifier's rates, beside blocks that are drawn with them."""

import numpy as np
import pytest

from specdist.data.stats.shard import Stats
from specdist.job.totals.sprinter import VerifierRates, verifier_figures, verifier_rates

RATES = {"acceptable": 0.6, "true_positive": 0.9, "false_positive": 0.3}
# Of acceptable tokens and of the others.
ACCEPTANCES = np.array([1.0, 0.25])
LAMBDA, THRESHOLD, CAP = 1.25, 0.5, 6


def drawn_tokens(rng: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    """min(1, P/Q) and whether the verifier lets it pass."""
    is_other_N = rng.random(num) >= RATES["acceptable"]
    rates_N = np.where(is_other_N, RATES["false_positive"], RATES["true_positive"])
    return ACCEPTANCES[is_other_N.astype(int)], rng.random(num) < rates_N


def drawn_run(rng: np.random.Generator, num_blocks: int, *, is_exact: bool) -> Stats:
    stats = Stats()
    acceptances, passes = drawn_tokens(rng, num_blocks * CAP)
    is_accepted = rng.random(num_blocks * CAP) < acceptances
    for block in range(num_blocks):
        tokens = slice(block * CAP, (block + 1) * CAP)
        length = min(CAP, int(np.argmin([*passes[tokens], False])) + 1)
        judged = is_accepted[tokens][:length]
        if not is_exact:
            judged = np.array([True] * (length - 1) + [judged[-1]])
        stats.observe_block(num_drafted=length, num_accepted=int(np.argmin([*judged, False])))
    return stats


def test_rates_are_those_that_tokens_were_drawn_with() -> None:
    acceptances, passes = drawn_tokens(np.random.default_rng(0), 40_000)
    rates = verifier_rates(acceptances, np.where(passes, 0.7, 0.2), max_ratio=LAMBDA, threshold=THRESHOLD)
    assert rates is not None
    for name, value in RATES.items():
        assert getattr(rates, name) == pytest.approx(value, abs=0.02), name
    assert rates.pass_rate == pytest.approx(passes.mean())
    assert rates.acceptance == pytest.approx(0.6 + 0.4 * 0.25, abs=0.02)
    assert rates.doubted_acceptance == pytest.approx(acceptances[~passes].mean())


def test_a_ratio_at_the_bound_is_acceptable() -> None:
    acceptances = np.float32([1 / LAMBDA, 1 / (LAMBDA + 0.01), 1.0])
    rates = verifier_rates(acceptances, np.float32([0.9, 0.1, 0.1]), max_ratio=LAMBDA, threshold=THRESHOLD)
    assert rates is not None and rates.acceptable == pytest.approx(2 / 3)
    assert rates.true_positive == 0.5 and rates.false_positive == 0.0


@pytest.mark.parametrize("estimate", [0.9, 0.1])
def test_shares_of_nothing_are_none(estimate: float) -> None:
    estimates = np.full(3, estimate)
    for acceptances in (np.ones(3), np.zeros(3), np.zeros(0)):
        found = verifier_rates(acceptances, estimates[: len(acceptances)], max_ratio=1.0, threshold=THRESHOLD)
        assert found is None


@pytest.mark.parametrize("is_exact", [True, False])
def test_blocks_and_calls_are_those_of_a_drawn_run(is_exact: bool) -> None:
    stats = drawn_run(np.random.default_rng(1), 20_000, is_exact=is_exact)
    figures = verifier_figures(known_rates(), stats, max_draft_tokens=CAP, is_exact=is_exact)
    for name in ("block_length", "tokens_per_call"):
        assert figures[name].ratio == pytest.approx(1, abs=0.015), name


def test_what_trusting_saves_and_what_it_costs() -> None:
    rng = np.random.default_rng(2)
    runs = [drawn_run(rng, 20_000, is_exact=is_exact) for is_exact in (True, False)]
    verifying, trusting = (1 + run.num_accepted_tokens / run.num_drafts for run in runs)
    figures = verifier_figures(known_rates(), runs[1], max_draft_tokens=CAP, is_exact=False)
    assert figures["calls_over_verifying_all"].predicted == pytest.approx(verifying / trusting, rel=0.015)
    assert figures["distance"].predicted == pytest.approx(0.3 * (1 - 0.7))


@pytest.mark.parametrize("max_ratio", [1.0, 4.0])
def test_the_distance_is_that_of_the_mechanism(max_ratio: float) -> None:
    """After one prefix, with a verifier that knows more than whether a token is acceptable; whatever the
    ratio that it was trained for."""
    rng = np.random.default_rng(3)
    target_V, draft_V = rng.dirichlet(np.ones(8), size=2)
    acceptance_V, passes_V = np.minimum(1, target_V / draft_V), rng.random(8)
    trusted_V = draft_V * passes_V
    kept_V = (draft_V - trusted_V) * acceptance_V
    residual_V = np.maximum(0, target_V - draft_V)
    output_V = trusted_V + kept_V + (1 - (trusted_V + kept_V).sum()) * residual_V / residual_V.sum()
    drawn_N = rng.choice(8, size=200_000, p=draft_V)
    rates = verifier_rates(
        acceptance_V[drawn_N],
        np.where(rng.random(len(drawn_N)) < passes_V[drawn_N], 0.9, 0.1),
        max_ratio=max_ratio,
        threshold=THRESHOLD,
    )
    assert rates is not None
    figures = verifier_figures(
        rates, drawn_run(rng, 10, is_exact=False), max_draft_tokens=CAP, is_exact=False
    )
    measured = figures["distance"].measured
    assert measured == pytest.approx(np.abs(output_V - target_V).sum() / 2, rel=0.02)
    # Theorem 1 has the mean of f over these tokens in place of every token's own.
    excess_V = draft_V * (draft_V > target_V)
    expected = (excess_V @ passes_V) / excess_V.sum() * (draft_V @ (1 - acceptance_V))
    assert figures["distance"].predicted == pytest.approx(expected, rel=0.02)
    assert abs(expected / measured - 1) > 0.05


def known_rates() -> VerifierRates:
    doubted = 0.6 * 0.1 + 0.4 * 0.7
    return VerifierRates(
        **RATES,
        acceptance=0.7,
        doubted_acceptance=(0.6 * 0.1 + 0.4 * 0.7 * 0.25) / doubted,
        false_positive_at_one=RATES["false_positive"],
        passed_excess=0.4 * 0.3 * 0.75,
    )
