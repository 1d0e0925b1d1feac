"""Runs an EAGLE-3 draft.

T flat tokens, N tokens whose logits are wanted, E hidden size, S numbers of the target's three states.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionCall, AttentionRules, LayerAttention, PagedAttention
from specdist.models.drafters.eagle3 import EAGLE3, LlamaForCausalLMEagle3
from specdist.models.drafters.runner import DrafterPass, DrafterRunner, WithoutFirst
from specdist.models.passes.flat import AttentionGroup, AttentionPlan, FlatBatch, plan_attention
from specdist.models.passes.torch_pass import NOT_ALLOCATED, PassOutputs

LAYER = 0
RULES = AttentionRules(scale=None, window=None, softcap=None)


class Eagle3Pass(DrafterPass):
    """Its logits are of the draft's vocabulary within the target's. Its queries are of the tokens alone whose
    logits are wanted: of the others only keys and values are needed."""

    kind = EAGLE3
    _model: LlamaForCausalLMEagle3

    def kept(self, states_TS: Tensor) -> Tensor:
        fused: Tensor = self._model.fc(states_TS)
        return fused

    def attention_to(self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray) -> LayerAttention:
        assert self._cache is not None, NOT_ALLOCATED
        groups: list[AttentionGroup] = []
        if len(asked_N):
            asking = FlatBatch(asked_N, batch.slots_T[asked_N], batch.positions_T[asked_N])
            plan = plan_attention(asking, pages_SP, self._cache.page_size, self._device)
            groups = [dataclasses.replace(group, keys_class=WithoutFirst) for group in plan.groups]
        return _DraftAttention(self._cache, AttentionPlan(self.places(batch, pages_SP), groups))

    @torch.inference_mode()
    def step(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        logits_index_N: Tensor,
        attention: LayerAttention,
        incoming_TE: Tensor,
    ) -> PassOutputs:
        outgoing_NE, logits_NV = self._model.draft(
            token_ids_T,
            incoming_TE,
            self._model.rotation(positions_T),
            logits_index_N,
            lambda queries, keys, values: attention.attend(
                LAYER, AttentionCall(queries, keys, values, RULES)
            ),
        )
        return PassOutputs(logits_NV, outgoing_NE)


class Eagle3Runner(DrafterRunner):
    """With the contexts of an EAGLE-3 draft."""

    model: LlamaForCausalLMEagle3
    pass_class = Eagle3Pass


class _DraftAttention(PagedAttention):
    """Writes all keys and values, and reads them for the tokens whose logits are wanted: perhaps for none."""

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        if self._plan.groups:
            return super().attend(layer, call)
        self._cache.write(layer, self._plan.cache_index_T, call.keys, call.values)
        return call.queries_THD
