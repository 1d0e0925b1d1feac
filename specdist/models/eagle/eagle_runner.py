"""An EAGLE-3 draft with its cache, run by the same function as every model.

A token is run at its own position with the fused state of the token before it. Fused states lie in pages as
keys and values do, so that shared prefixes, preemptions and rejections need no bookkeeping of their own: the
target's states overwrite what the draft has put in their place. A sequence's first token has no state before
it, is never run, and is seen by no other.

T flat tokens, N tokens whose logits are wanted, E hidden size, S numbers of the target's three states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionCall, AttentionRules, LayerAttention, PagedAttention
from specdist.models.attention.kernel import PagedKernel
from specdist.models.cache.key_value import KeyValueCache, untouched_zeros
from specdist.models.eagle.eagle import LlamaForCausalLMEagle3
from specdist.models.passes.flat import (
    AttentionGroup,
    AttentionPlan,
    FlatBatch,
    SeenKeys,
    cache_indices,
    plan_attention,
)
from specdist.models.passes.runner import Acceleration, ModelRunner
from specdist.models.passes.torch_pass import NOT_ALLOCATED, PassOutputs, TorchPass

LAYER = 0
RULES = AttentionRules(scale=None, window=None, softcap=None)


class EaglePass(TorchPass):
    """Its logits are of the draft's vocabulary within the target's, its hidden states the draft's outputs."""

    _model: LlamaForCausalLMEagle3
    _states: Tensor | None = None

    def bind(self, cache: KeyValueCache, kernel: PagedKernel | None) -> None:
        super().bind(cache, kernel)
        keys = cache.keys[LAYER]
        shape = (len(keys) * cache.page_size, self._model.config.hidden_size)
        self._states = untouched_zeros(shape, keys.dtype, self._device)

    @torch.inference_mode()
    def receive(self, batch: FlatBatch, pages: np.ndarray, states_TS: Tensor) -> None:
        """The target's states after these tokens, whose slots have these pages."""
        assert self._states is not None, NOT_ALLOCATED
        own = states_TS.to(device=self._device, dtype=self._states.dtype)
        self._states[self._places(batch, pages)] = self._model.fc(own)

    def _places(self, batch: FlatBatch, pages: np.ndarray) -> Tensor:
        assert self._cache is not None, NOT_ALLOCATED
        return torch.from_numpy(cache_indices(batch, pages, self._cache.page_size)).to(self._device)

    @torch.inference_mode()
    def run(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, *, with_hidden: bool = False
    ) -> PassOutputs:
        del with_hidden
        assert self._cache is not None and self._states is not None, NOT_ALLOCATED
        before_T = np.maximum(batch.positions_T - 1, 0)
        before = FlatBatch(batch.token_ids_T, batch.slots_T, before_T)
        incoming_TE = self._states[self._places(before, pages_SP)]
        places_T = self._places(batch, pages_SP)
        groups: list[AttentionGroup] = []
        if len(asked_N):
            asking = FlatBatch(asked_N, batch.slots_T[asked_N], batch.positions_T[asked_N])
            plan = plan_attention(asking, pages_SP, self._cache.page_size, self._device)
            groups = [dataclasses.replace(group, keys_class=_WithoutFirst) for group in plan.groups]
        index_N = torch.from_numpy(asked_N).to(self._device)
        outputs = self.compute(
            torch.as_tensor(batch.token_ids_T, dtype=torch.int64, device=self._device),
            torch.from_numpy(before_T).to(self._device),
            index_N,
            _DraftAttention(self._cache, AttentionPlan(places_T, groups)),
            incoming_TE=incoming_TE,
        )
        assert outputs.hidden_NH is not None
        self._states[places_T[index_N]] = outputs.hidden_NH
        return outputs

    @torch.inference_mode()
    def compute(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        logits_index_N: Tensor,
        attention: LayerAttention,
        *,
        with_hidden: bool = False,
        incoming_TE: Tensor | None = None,
    ) -> PassOutputs:
        """``incoming_TE``: the states before the tokens; in a dry run there are none."""
        del with_hidden
        if incoming_TE is None:
            incoming_TE = torch.zeros_like(self._model.embed_tokens(token_ids_T))
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


class EagleRunner(ModelRunner):
    """Contexts, of which no logits are wanted, wait for the target's states: :meth:`receive`."""

    model: LlamaForCausalLMEagle3
    pass_class = EaglePass

    def __init__(
        self,
        model: LlamaForCausalLMEagle3,
        device: torch.device,
        on_pass: Callable[[], None] | None = None,
    ) -> None:
        self._waiting: list[FlatBatch] = []
        super().__init__(model, device, Acceleration(), model_impl="transformers", on_pass=on_pass)

    def bytes_per_page(self, page_size: int) -> int:
        own = page_size * self.model.config.hidden_size * self.dtype.itemsize
        return super().bytes_per_page(page_size) + own

    def receive(self, slots_T: np.ndarray, positions_T: np.ndarray, states_TS: Tensor) -> None:
        """The target's states after these tokens. The page table must be that of the pass that they are from.
        Then run the contexts of that pass."""
        assert isinstance(self.torch_pass, EaglePass)
        self.torch_pass.receive(FlatBatch(slots_T, slots_T, positions_T), self.pages.pages, states_TS)
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            super().forward(batch, [])

    def drop_waiting(self) -> None:
        """The pass over the contexts that wait has failed."""
        self._waiting = []

    def forward(self, batch: FlatBatch, logits_index: Any) -> Tensor:
        if len(logits_index):
            return super().forward(batch, logits_index)
        self._waiting.append(batch)
        return torch.empty(0, self.model.config.vocab_size, device=self.device)


class _DraftAttention(PagedAttention):
    """Writes all keys and values, and reads them for the tokens whose logits are wanted: perhaps for none."""

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        if self._plan.groups:
            return super().attend(layer, call)
        self._cache.write(layer, self._plan.cache_index_T, call.keys, call.values)
        return call.queries_THD


class _WithoutFirst(SeenKeys):
    """Queries do not see their sequence's first position."""

    def bias(self, window: int | None, num_repeats: int, dtype: torch.dtype) -> Tensor:
        found = super().bias(window, num_repeats, dtype)
        if found is None:
            num_segments, num_queries = self.positions_RQ.shape
            shape = (num_segments, 1, num_repeats * num_queries, self.num_keys)
            found = torch.zeros(shape, dtype=dtype, device=self.positions_RQ.device)
        # One at the first position has no other to see; nothing depends on it.
        is_hidden_RQ = (self.positions_RQ > 0).repeat(1, num_repeats)
        found[:, 0, :, 0].masked_fill_(is_hidden_RQ, -torch.inf)
        return found
