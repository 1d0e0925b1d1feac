"""Acceptance is that of the engine, and promises what its rounds yield."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdist.policies.formulas import tokens_per_call
from specdist.sampling.distributions import SamplingSettings
from specdist.training.drafts.acceptance import Places, Prospect, acceptances, prospect
from specdist.training.drafts.training import History

V = 40


def places(ids: torch.Tensor, probabilities: torch.Tensor | None = None) -> Places:
    return Places(
        token_ids_M=ids,
        stream_keys_M=torch.full_like(ids, 12345),
        positions_M=torch.arange(len(ids)),
        probabilities_M=probabilities,
    )


def test_with_rejection_the_targets_tokens_alone_give_the_common_mass() -> None:
    """min(1, Q / P) of tokens of the target has the mean sum min(P, Q), after temperature and top-k."""
    generator = torch.Generator().manual_seed(1)
    draft, target = (torch.randn(1, V, generator=generator) for _ in range(2))
    settings = SamplingSettings(temperature=0.7, top_k=12)
    [exact] = acceptances(draft, places(torch.zeros(1, dtype=torch.int64)), settings, target)
    kept = [
        logits.masked_fill(logits < logits.topk(12).values[:, -1:], -torch.inf) for logits in (draft, target)
    ]
    shares = [(logits / 0.7).softmax(-1) for logits in kept]
    assert float(exact) == pytest.approx(float(torch.minimum(*shares).sum()), abs=1e-5)
    ids = torch.arange(V)[shares[1][0] > 0]
    found = acceptances(draft.expand(len(ids), V), places(ids, shares[1][0, ids].double()), settings)
    assert float((found * shares[1][0, ids]).sum()) == pytest.approx(float(exact), abs=1e-5)


@pytest.mark.parametrize("settings", [SamplingSettings(temperature=0), SamplingSettings(is_coupled=True)])
def test_draws_that_are_the_same_are_accepted(settings: SamplingSettings) -> None:
    """Of the target itself every one; of another model as many as one draws the target's token."""
    generator = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(400, V, generator=generator)
    draft = target + 1.5 * torch.randn(400, V, generator=generator)
    none = places(torch.zeros(400, dtype=torch.int64))
    drawn = torch.stack([
        acceptances(target, places(torch.full((400,), token)), settings) for token in range(V)
    ])  # fmt: skip
    assert bool((drawn.sum(0) == 1).all())
    own = places(drawn.argmax(0))
    assert float(acceptances(target, own, settings).min()) == 1
    found = float(acceptances(draft, own, settings).mean())
    assert 0.2 < found < 0.9
    assert found > 3 * float(acceptances(draft, none, settings).mean())


def test_a_constant_acceptance_promises_the_formula() -> None:
    """Leviathan et al. 2023, Theorem 3.8, away from the completion's end."""
    found = prospect([np.full(20_000, 0.7)], cost_ratio=0.1)
    assert found.acceptance == pytest.approx(0.7)
    factors = [tokens_per_call(0.7, length) / (1 + 0.1 * length) for length in range(17)]
    assert found.speed_up == pytest.approx(factors[found.num_draft_tokens], rel=1e-3)
    assert found.num_draft_tokens == np.argmax(factors)


def test_accepted_tokens_in_a_row_promise_more_than_scattered_ones() -> None:
    """The same mean; and a block does not reach into the next completion."""
    scattered, together = np.tile([1.0, 0.0], 200), np.tile([1.0] * 20 + [0.0] * 20, 10)
    few, many = prospect([scattered], 0.05), prospect([together], 0.05)
    assert few.acceptance == many.acceptance == 0.5
    assert few.tokens_per_pass == pytest.approx(1.5)
    assert many.tokens_per_pass > 4
    alone = [prospect([np.ones(1)] * number, 0.01).tokens_per_pass for number in (1, 30)]
    assert alone == [2.0, 2.0]


def test_a_draft_that_is_as_slow_as_the_target_promises_nothing() -> None:
    found = prospect([np.full(100, 0.9)], cost_ratio=1.0)
    assert (found.num_draft_tokens, found.speed_up, found.tokens_per_pass) == (0, 1.0, 1.0)


def test_the_error_of_a_prospect_is_the_spread_of_others_like_it() -> None:
    """Completions of 30 tokens, all of one alike; and where no candidates pay, nothing is uncertain."""
    generator = np.random.default_rng(0)

    def drawn(cost_ratio: float) -> Prospect:
        levels = generator.choice([0.2, 0.9], size=24)
        return prospect([np.full(30, level) for level in levels], cost_ratio)

    assert drawn(10.0).error == 0
    found = [drawn(0.01) for _ in range(200)]
    spread = np.std([each.speed_up for each in found])
    assert np.mean([each.error for each in found]) == pytest.approx(spread, rel=0.25)


def test_two_drafts_on_the_same_completions_differ_by_less_than_either_is_uncertain() -> None:
    """One accepts a little more of each of the easy and the hard completions."""
    levels = np.random.default_rng(0).choice([0.2, 0.8], size=24)
    worse, better = (prospect([np.full(30, level + more) for level in levels], 0.01) for more in (0, 0.05))
    assert better.error_beside(worse) < better.error / 3
    assert 0 < better.error_beside(worse) == worse.error_beside(better)
    assert better.error_beside(better) == 0


def test_the_best_evaluation_is_the_latest_within_an_error_of_the_highest() -> None:
    """An error of their difference: two completions, of which one changes from one evaluation to the next."""

    def history(*speed_ups: float, shared: float = 5.0) -> History:
        found = [
            Prospect(
                acceptance=0.5, num_draft_tokens=3, tokens_per_pass=2.0, speed_up=each,
                deviations=[shared, 0.1 * (index % 2)],
            )
            for index, each in enumerate(speed_ups)
        ]  # fmt: skip
        return History(prospects=found)

    assert history(1.0, 1.5, 1.45, 1.3, 1.42).best == 4
    assert history(1.0, 1.5, 1.45, 1.3, 1.3).best == 2
    assert history(1.0, 1.5, 1.3, 1.3).is_over(2) and not history(1.0, 1.5, 1.45, 1.3, 1.42).is_over(1)
