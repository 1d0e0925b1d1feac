"""Other weights in the place of a running model's own: no address changes, and recorded passes stay."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdist.models.runner import ModelRunner


@torch.no_grad()
def replace_weights(runner: ModelRunner, weights: Mapping[str, Tensor]) -> None:
    """Between two passes. Those that are not named stay, and so does what the cache has.

    Raises KeyError for a name that the model does not have.
    """
    own = parameters_of(runner)
    for name, weight in weights.items():
        own[name].copy_(weight)
    if runner.own_pass is not None:
        runner.own_pass.refresh()


def parameters_of(runner: ModelRunner) -> dict[str, Tensor]:
    """Under every name that a parameter has: a tied one has two."""
    return dict(runner.model.named_parameters(remove_duplicate=False))
