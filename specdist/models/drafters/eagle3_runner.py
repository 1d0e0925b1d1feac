"""Runs an EAGLE-3 draft.

T flat tokens, N tokens whose logits are wanted, E hidden size, S numbers of the target's three states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionCall, AttentionRules, LayerAttention
from specdist.models.batch.flat import PassOutputs
from specdist.models.draft_models.eagle3 import EAGLE3, LlamaForCausalLMEagle3
from specdist.models.drafters.runner import DrafterPass, DrafterRunner

RULES = AttentionRules(scale=None, window=None, softcap=None, hides_first=True)


class Eagle3Pass(DrafterPass):
    """Its logits are of the draft's vocabulary within the target's. Of contexts the last layer makes keys and
    values alone."""

    kind = EAGLE3
    _model: LlamaForCausalLMEagle3

    def kept(self, states_TS: Tensor) -> Tensor:
        return self._model.fused(states_TS)

    @torch.inference_mode()
    def step(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        logits_index_N: Tensor,
        attention: LayerAttention,
        incoming_TE: Tensor,
    ) -> PassOutputs:
        outgoing_NE = self.outputs(token_ids_T, positions_T, logits_index_N, attention, incoming_TE)
        return PassOutputs(self._model.logits(outgoing_NE), outgoing_NE)

    def outputs(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        index_N: Tensor,
        attention: LayerAttention,
        incoming_TE: Tensor,
    ) -> Tensor:
        """[N, E]."""

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attention.attend(layer, AttentionCall(queries, keys, values, RULES))

        with self.fused():
            rotation = self._model.rotation(positions_T)
            return self._model.draft(token_ids_T, incoming_TE, rotation, index_N, attend)


class Eagle3Runner(DrafterRunner):
    """With the contexts of an EAGLE-3 draft."""

    model: LlamaForCausalLMEagle3
    pass_class = Eagle3Pass
