"""Runs a checkpoint's MTP head: a model of one layer, with the attention, experts and cache of its family.

T flat tokens, N tokens whose logits are wanted, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdist.models.attention.attention import LayerAttention
from specdist.models.batch.flat import PassOutputs
from specdist.models.draft_models.mtp import MTP, joining
from specdist.models.drafters.runner import DrafterPass, DrafterRunner
from specdist.models.passes.torch_pass import TorchPass


class MtpPass(DrafterPass):
    """Its hidden states are what its output head reads, as the target's are."""

    kind = MTP

    def step(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        logits_index_N: Tensor,
        attention: LayerAttention,
        incoming_TE: Tensor,
    ) -> PassOutputs:
        num_asked = len(logits_index_N)
        # The output head needs at least one token.
        kept_N = logits_index_N if num_asked else torch.zeros_like(token_ids_T[:1])
        with joining(self._model, incoming_TE):
            logits_NV, hidden_NE = TorchPass.compute(
                self, token_ids_T, positions_T, kept_N, attention, with_hidden=True
            )
        assert hidden_NE is not None
        return PassOutputs(logits_NV[:num_asked], hidden_NE[:num_asked])


class MtpRunner(DrafterRunner):
    """With the contexts of an MTP head."""

    pass_class = MtpPass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shapes.hide_first()
