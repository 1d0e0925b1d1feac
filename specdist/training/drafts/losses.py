"""How far the draft's distribution is from the target's, at M positions: a sum over them in float32.

kl is the usual loss of distillation; reverse KL and TVD++ put the mass where the draft has its own. The
full distribution may be unknown but for K likeliest tokens: then all others are one token more.

M positions, V vocabulary, K recorded tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

# A share that is smaller counts as this large: its logarithm must stay finite.
LEAST_SHARE = 1e-9


def kl(logs_MV: Tensor, target_logs_MV: Tensor) -> Tensor:
    """KL(target || draft)."""
    return F.kl_div(logs_MV, target_logs_MV, log_target=True, reduction="sum")


def reverse_kl(logs_MV: Tensor, target_logs_MV: Tensor) -> Tensor:
    """KL(draft || target)."""
    return F.kl_div(target_logs_MV, logs_MV, log_target=True, reduction="sum")


def tvd(logs_MV: Tensor, target_logs_MV: Tensor) -> Tensor:
    """TVD++ (Goel et al. 2024, arXiv:2403.00858, Lemma 1 and Equation 5): the total variation distance as the
    policy gradient of the reward 1{P > Q}, normalised over all positions.

    The expectation over the draft's tokens is exact here, not sampled. Its value is the negative advantage
    under the draft, near 0; only its gradient means anything.
    """
    shares_MV = logs_MV.exp()
    with torch.no_grad():
        reward_MV = (target_logs_MV > logs_MV).to(logs_MV.dtype)
        mean = (shares_MV * reward_MV).sum(1).mean()
        variance = (shares_MV * (reward_MV - mean) ** 2).sum(1).mean()
        advantage_MV = (reward_MV - mean) / variance.sqrt().clamp_min(1e-6)
    return -(shares_MV * advantage_MV).sum()


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "reverse_kl": reverse_kl, "tvd": tvd}


def distribution_loss(name: str, logits_MV: Tensor, target_logs_MV: Tensor) -> Tensor:
    """Of draft logits against the log-probabilities of the target."""
    return LOSSES[name](logits_MV.float().log_softmax(-1), target_logs_MV)


def top_loss(name: str, logits_MV: Tensor, top_ids_MK: Tensor, top_logs_MK: Tensor) -> Tensor:
    """The same over K + 1 tokens: those recorded, and all others as one."""
    logs_MK = logits_MV.float().log_softmax(-1).gather(1, top_ids_MK)
    return LOSSES[name](_with_rest(logs_MK), _with_rest(top_logs_MK))


def token_loss(logits_MV: Tensor, token_ids_M: Tensor) -> Tensor:
    """The cross entropy of the target's tokens."""
    return F.cross_entropy(logits_MV.float(), token_ids_M, reduction="sum")


def _with_rest(logs_MK: Tensor) -> Tensor:
    """With the logarithm of what is left of 1."""
    rest_M1 = (1 - logs_MK.exp().sum(1, keepdim=True)).clamp_min(LEAST_SHARE)
    return torch.cat([logs_MK, rest_M1.log()], 1)
