"""Losses are those of the papers, and recorded distributions give what whole ones do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdist.training.drafts.losses import LOSSES, distribution_loss, token_loss, top_loss

M, V = 7, 11


def logits(seed: int, scale: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(M, V, generator=generator, dtype=torch.float64)).float()


@pytest.mark.parametrize("name", LOSSES)
def test_the_target_itself_is_where_a_loss_is_smallest(name: str) -> None:
    """Descent from elsewhere ends with nearly all of the mass in common."""
    target_logs = logits(1).log_softmax(-1)
    draft = logits(2).requires_grad_()
    before = torch.minimum(draft.softmax(-1), target_logs.exp()).sum(1).mean()
    optimizer = torch.optim.Adam([draft], lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        distribution_loss(name, draft, target_logs).backward()
        optimizer.step()
    after = torch.minimum(draft.softmax(-1), target_logs.exp()).sum(1).mean()
    assert before < 0.75 and after > 0.97


def test_divergences_are_those_of_their_definitions() -> None:
    draft, target = logits(1).softmax(-1), logits(2).softmax(-1)
    kl = (target * (target / draft).log()).sum()
    reverse = (draft * (draft / target).log()).sum()
    assert distribution_loss("kl", logits(1), target.log()) == pytest.approx(float(kl), rel=1e-4)
    assert distribution_loss("reverse_kl", logits(1), target.log()) == pytest.approx(float(reverse), rel=1e-4)


def test_the_gradient_of_tvd_is_that_of_the_distance_over_the_spread_of_rewards() -> None:
    """Goel et al. 2024, Lemma 1: without the normalisation it is the gradient of the distance itself."""
    target = logits(2).softmax(-1)
    draft = logits(1).requires_grad_()
    distribution_loss("tvd", draft, target.log()).backward()
    found = draft.grad
    assert found is not None
    plain = logits(1).requires_grad_()
    distance = 0.5 * (plain.softmax(-1) - target).abs().sum()
    distance.backward()
    assert plain.grad is not None
    shares, rewards = plain.detach().softmax(-1), (target > plain.detach().softmax(-1)).float()
    mean = (shares * rewards).sum(1).mean()
    spread = (shares * (rewards - mean) ** 2).sum(1).mean().sqrt()
    torch.testing.assert_close(found, plain.grad / spread, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_record_of_all_tokens_gives_the_same_loss(name: str) -> None:
    target_logs = logits(2).log_softmax(-1)
    top_logs, top_ids = target_logs.sort(1, descending=True)
    found = top_loss(name, logits(1), top_ids, top_logs)
    assert found == pytest.approx(float(distribution_loss(name, logits(1), target_logs)), abs=2e-3)


def test_what_is_not_recorded_counts_as_one_token() -> None:
    """A draft that agrees on the recorded tokens has nothing to learn, wherever its other mass is."""
    target_logs = logits(2).log_softmax(-1)
    top_logs, top_ids = target_logs.topk(4)
    moved = target_logs.clone()
    rest = torch.ones_like(moved, dtype=torch.bool).scatter(1, top_ids, False)
    moved[rest] = moved[rest].view(M, -1).flip(1).flatten()
    assert abs(float(top_loss("kl", moved, top_ids, top_logs))) < 1e-4
    assert float(distribution_loss("kl", moved, target_logs)) > 0.1
    assert float(top_loss("kl", logits(1), top_ids, top_logs)) > 0.1


def test_the_loss_of_tokens_is_their_cross_entropy() -> None:
    ids = torch.arange(M)
    expected = -logits(1).log_softmax(-1)[ids, ids].sum()
    assert token_loss(logits(1), ids) == pytest.approx(float(expected), rel=1e-5)


def test_mass_on_what_is_not_recorded_costs() -> None:
    """A draft with the right proportions among the recorded tokens, and most of its mass elsewhere."""
    target_logs = logits(2).log_softmax(-1)
    top_logs, top_ids = target_logs.topk(4)
    is_other = torch.ones_like(target_logs, dtype=torch.bool).scatter(1, top_ids, False)
    assert float(top_loss("kl", target_logs + 3 * is_other, top_ids, top_logs)) > 1
