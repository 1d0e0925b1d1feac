"""Losses are those of the papers, recorded distributions give what whole ones do, and acceptance is that of
the engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdist.sampling.distributions import SamplingSettings
from specdist.training.drafts.config import DistillConfig
from specdist.training.drafts.trainer import Known, acceptances, divergence, loss_of

M, V = 7, 40


def logits(seed: int, num: int = M) -> Tensor:
    return 1.5 * torch.randn(num, V, generator=torch.Generator().manual_seed(seed))


def config(**options: str) -> DistillConfig:
    return DistillConfig(run="run", new_draft="new", **options)


def top(target_logs: Tensor, num: int) -> Known:
    top_logs, top_ids = target_logs.topk(num)
    return {"top_logprobs": top_logs, "top_logprob_ids": top_ids}


def test_the_target_itself_is_where_the_loss_is_smallest() -> None:
    """Descent from elsewhere ends with nearly all of the mass in common."""
    target_logs, draft = logits(1).log_softmax(-1), logits(2).requires_grad_()
    common = [torch.minimum(draft.softmax(-1), target_logs.exp()).sum(1).mean()]
    optimizer = torch.optim.Adam([draft], lr=0.02)
    for _ in range(600):
        optimizer.zero_grad()
        divergence(draft.log_softmax(-1), target_logs).backward()
        optimizer.step()
    common.append(torch.minimum(draft.softmax(-1), target_logs.exp()).sum(1).mean())
    assert common[0] < 0.75 and common[1] > 0.97


def test_each_teacher_has_its_loss() -> None:
    """A record of all tokens gives the loss of the whole distribution."""
    target_logs, draft = logits(2).log_softmax(-1), logits(1)
    kl = (target_logs.exp() * (target_logs - draft.log_softmax(-1))).sum(1).mean()
    assert loss_of(config(), draft, logits(2), {}) == pytest.approx(float(kl), rel=1e-4)
    assert loss_of(config(), draft, None, top(target_logs, V)) == pytest.approx(float(kl), abs=1e-3)
    labels = torch.arange(M)
    expected = -draft.log_softmax(-1)[labels, labels].mean()
    found = loss_of(config(teacher="tokens"), draft, None, {"labels": labels})
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_what_is_not_recorded_counts_as_one_token() -> None:
    """A draft that agrees on the recorded tokens has nothing to learn; mass elsewhere costs."""
    target_logs = logits(2).log_softmax(-1)
    known = top(target_logs, 4)
    rest = torch.ones_like(target_logs, dtype=torch.bool).scatter(1, known["top_logprob_ids"], False)
    moved = target_logs.clone()
    moved[rest] = moved[rest].view(M, -1).flip(1).flatten()
    assert abs(float(loss_of(config(), moved, None, known))) < 1e-4
    assert float(loss_of(config(), target_logs + 3 * rest, None, known)) > 0.1


def test_with_rejection_the_targets_tokens_alone_give_the_common_mass() -> None:
    """min(1, Q / P) of tokens of the target has the mean sum min(P, Q), after temperature and top-k."""
    draft, target = logits(1, 1), logits(2, 1)
    settings = SamplingSettings(temperature=0.7, top_k=12)
    [exact] = acceptances(settings, draft, target, {})
    kept = [each.masked_fill(each < each.topk(12).values[:, -1:], -torch.inf) for each in (draft, target)]
    shares = [(each / 0.7).softmax(-1) for each in kept]
    assert float(exact) == pytest.approx(float(torch.minimum(*shares).sum()), abs=1e-5)
    ids = torch.arange(V)[shares[1][0] > 0]
    probabilities = shares[1][0, ids].double()
    known = {"labels": ids, "processed_logprobs": probabilities.log()}
    found = acceptances(settings, draft.expand(len(ids), V), None, known)
    assert float((found * probabilities).sum()) == pytest.approx(float(exact), abs=1e-5)
    bound = acceptances(settings, draft.expand(len(ids), V), None, {"labels": ids})
    assert float((bound * probabilities).sum()) < float(exact)


def test_greedily_the_target_s_own_choice_is_accepted() -> None:
    """Of the target itself every token; of another model as many as are its likeliest, too."""
    target, draft = logits(1, 400), logits(1, 400) + logits(2, 400)
    settings, known = SamplingSettings(temperature=0), {"labels": target.argmax(1)}
    assert float(acceptances(settings, target, target, known).min()) == 1
    found = acceptances(settings, draft, target, known)
    assert found.tolist() == (draft.argmax(1) == target.argmax(1)).tolist()
    assert 0.2 < float(found.mean()) < 0.9
