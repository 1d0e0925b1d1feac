"""Runs a checkpoint's MTP head: a model of one layer, with the attention, experts and cache of its family.

T flat tokens, N tokens whose logits are wanted, E hidden size.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import LayerAttention, PagedAttention
from specdist.models.drafters.mtp import MTP, joining
from specdist.models.drafters.runner import DrafterPass, DrafterRunner, WithoutFirst
from specdist.models.passes.flat import FlatBatch, plan_attention
from specdist.models.passes.torch_pass import NOT_ALLOCATED, PassOutputs, TorchPass


class MtpPass(DrafterPass):
    """Its hidden states are what its output head reads, as the target's are."""

    kind = MTP

    def attention_to(self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray) -> LayerAttention:
        del asked_N
        assert self._cache is not None, NOT_ALLOCATED
        plan = plan_attention(batch, pages_SP, self._cache.page_size, self._device)
        groups = [dataclasses.replace(group, keys_class=WithoutFirst) for group in plan.groups]
        return PagedAttention(self._cache, dataclasses.replace(plan, groups=groups))

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
