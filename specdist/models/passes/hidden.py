"""A model's last hidden states, and trained heads that read them.

They are the inputs of the output head, after the final norm, at the tokens whose logits are wanted. A hook at
the output head gets them for every family, without model code.

N tokens whose logits are wanted, H hidden size.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Estimates are at least so far from 0 and 1 where a logit is taken of them.
LEAST_ESTIMATE = 1e-15


class HiddenStateHead(nn.Module):
    """A trained head that a runner runs with its passes: from last hidden states [N, H] and, if it
    ``uses_features``, three features [3, N] of the same tokens, to a logit for each [N]."""

    @property
    def uses_features(self) -> bool:
        return False

    @property
    def reads_drawing_state(self) -> bool:
        """It reads the hidden state that a token was drawn from, and not the one with the token as input. A
        pass gives its logits without the features, :meth:`logits_of_draws` the rest."""
        return False

    def logits_of_draws(self, features_3N: Tensor) -> Tensor:
        """[N]: what the features of the drawn tokens add, for a head that reads the drawing state."""
        return torch.zeros(features_3N.shape[1], device=features_3N.device)

    def estimates_of_draws(self, estimates_N: Tensor, features_3N: Tensor) -> Tensor:
        """float64 [N] in [0, 1]: a pass's estimates, of a head that reads the drawing state, for the tokens
        with these features that were then drawn."""
        added_N = self.logits_of_draws(features_3N).double()
        return (torch.logit(estimates_N, eps=LEAST_ESTIMATE) + added_N).sigmoid()

    def estimates_of(self, outputs: Tensor, drawn_features_3N: Tensor | None) -> Tensor:
        """float64 [N]: from a pass's outputs, as of :func:`with_head_logits`, the estimates of its tokens; or
        of those drawn after it, if the head reads the drawing state."""
        estimates_N = outputs[:, -1].double().sigmoid()
        if not self.reads_drawing_state:
            return estimates_N
        assert drawn_features_3N is not None
        return self.estimates_of_draws(estimates_N, drawn_features_3N)


def with_head_logits(
    logits_NV: Tensor, head: HiddenStateHead, hidden_NH: Tensor, features_3N: Tensor | None
) -> Tensor:
    """[N, V + 1]: one tensor, so that a recorded pass includes the head."""
    own_N = head(hidden_NH, features_3N)
    return torch.cat([logits_NV, own_N.to(logits_NV.dtype)[:, None]], dim=1)


class LastHiddenStates:
    """While it is open, ``hidden_NH`` is the output head's last input."""

    hidden_NH: Tensor

    def __init__(self, model: PreTrainedModel) -> None:
        self._head: nn.Module = model.get_output_embeddings()

    def __enter__(self) -> LastHiddenStates:
        self._hook = self._head.register_forward_pre_hook(self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()

    def _catch(self, head: nn.Module, inputs: tuple[Any, ...]) -> None:
        del head
        # A flat batch is one row for the model.
        self.hidden_NH = inputs[0][0]
