"""The Markov pair has the acceptance of its dial, and easy and hard stretches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdist.engine.draft.ahead.branches import BranchTable
from specdist.policies.formulas import caught_share
from specdist.sampling.branch_estimates import estimate_branches, likeliest
from specdist.sampling.distributions import SamplingSettings
from tests.lab.emulation.markov import MarkovModel, MarkovPair, PairSettings, markov_pair

VOCAB_SIZE = 1024


def pair(**settings: float) -> MarkovPair:
    return markov_pair(PairSettings(vocab_size=VOCAB_SIZE, **settings))  # type: ignore[arg-type]


def distributions(model: MarkovModel, temperature: float) -> torch.Tensor:
    """float64 [V, V]: of the next token by the last one, from nothing but the logits."""
    logits_VV = model.logits(torch.arange(VOCAB_SIZE)).double()
    return (logits_VV / temperature).softmax(dim=1)


@pytest.mark.parametrize(("acceptance", "variation"), [(0.3, 0.0), (0.8, 1.0)])
def test_greedy_acceptance_is_that_of_the_dial(acceptance: float, variation: float) -> None:
    """Over the whole chain of the target's likeliest tokens, which visits every token once."""
    models = pair(acceptance=acceptance, variation=variation)
    best_V, drafted_V = (distributions(model, 1.0).argmax(dim=1) for model in (models.target, models.draft))
    token, visited = 0, []
    for _ in range(VOCAB_SIZE):
        visited.append(token)
        token = int(best_V[token])
    assert token == 0 and len(set(visited)) == VOCAB_SIZE
    found = (best_V == drafted_V).double().mean()
    assert abs(found - acceptance) <= 0.5 / VOCAB_SIZE


@pytest.mark.parametrize(("acceptance", "temperature"), [(0.3, 0.6), (0.95, 1.0)])
def test_acceptance_of_samples_is_that_of_the_dial(acceptance: float, temperature: float) -> None:
    """sum min(P, Q), weighted by how often the target's chain is at each token: equally often, which is a
    property of the table that is checked too."""
    models = pair(acceptance=acceptance, variation=0.5, temperature=temperature)
    target_VV, draft_VV = (distributions(model, temperature) for model in (models.target, models.draft))
    assert torch.allclose(target_VV.sum(dim=0), torch.ones(VOCAB_SIZE, dtype=torch.float64), atol=1e-6)
    overlap_V = torch.minimum(target_VV, draft_VV).sum(dim=1)
    assert float(overlap_V.mean()) == pytest.approx(acceptance, abs=1e-6)
    order = torch.from_numpy(models.order_V)
    assert overlap_V[order].numpy() == pytest.approx(models.acceptance_V, abs=1e-6)


@pytest.mark.parametrize(("length", "num_branches"), [(5, 2), (9, 12)])
def test_branches_of_a_block_catch_as_many_misses_as_the_planner_assumes(
    length: int, num_branches: int
) -> None:
    """Of the blocks after every token: the draft's own choice of branches, as the engine makes it."""
    models = pair(acceptance=0.8)
    slots_S, last_S = np.arange(VOCAB_SIZE), torch.from_numpy(models.order_V.copy())
    scores, drawn = [], []
    for _ in range(length):
        scores.append(models.draft.logits(last_S))
        last_S = scores[-1].argmax(dim=1)
        drawn.append(last_S.numpy())
    wanted_SL = models.order_V[(slots_S[:, None] + 1 + np.arange(length)) % VOCAB_SIZE]
    greedy = SamplingSettings(temperature=0)
    likeliest_2NA = likeliest(torch.stack(scores, dim=1).flatten(end_dim=1), greedy, num_branches)
    estimates = estimate_branches(likeliest_2NA, np.stack(drawn, axis=1).ravel(), greedy)
    lengths_S, begins_S = np.full(VOCAB_SIZE, length), np.zeros(VOCAB_SIZE, np.int64)
    nothing = np.zeros(estimates.alternative_ids_NA.shape, bool)
    chosen = BranchTable(VOCAB_SIZE, num_branches).choose(
        slots_S, begins_S, lengths_S, estimates, nothing, num_branches
    )
    is_missed_SL = np.stack(drawn, axis=1) != wanted_SL
    first_S = np.where(is_missed_SL.any(axis=1), is_missed_SL.argmax(axis=1), length)
    is_caught_B = (chosen.positions_B == first_S[chosen.slots_B]) & (
        chosen.token_ids_B == wanted_SL[chosen.slots_B, np.minimum(first_S, length - 1)[chosen.slots_B]]
    )
    assert is_caught_B.sum() / (first_S < length).sum() == pytest.approx(caught_share(num_branches), abs=0.1)
