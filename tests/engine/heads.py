"""Heads for tests: random and constant."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from specdist.models.heads.head import TokenHead
from specdist.models.heads.info import HiddenState


def random_head(
    model: PreTrainedModel | PretrainedConfig,
    *,
    spread: float = 2.0,
    offset: float = 0.0,
    seed: int = 5,
    uses_features: bool = False,
    hidden_state: HiddenState = "own",
) -> TokenHead:
    """Its logits depend on the hidden state, and on the features where it reads them, with about this spread
    around the offset."""
    generator = torch.Generator().manual_seed(seed)
    hidden_size = getattr(model, "config", model).hidden_size
    depth = 1 if hidden_state == "own" else 0
    head = TokenHead(hidden_size, depth, uses_features=uses_features, hidden_state=hidden_state)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / hidden_size**0.5)
        head.output.weight.mul_(spread)
        head.output.bias.fill_(offset)
    return head.requires_grad_(False)


def constant_head(model: PreTrainedModel, logit: float, hidden_state: HiddenState = "own") -> TokenHead:
    """The same estimate for every token."""
    head = TokenHead(model.config.hidden_size, 0, hidden_state=hidden_state)
    with torch.no_grad():
        head.output.weight.zero_()
        head.output.bias.fill_(logit)
    return head.requires_grad_(False)
