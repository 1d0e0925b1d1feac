"""A drafter of the target's states with its cache, run by the same function as every model.

A token is run at its own position with the state of the token before it. States lie in pages as keys and
values do, so that shared prefixes, preemptions and rejections need no bookkeeping of their own: the target's
states overwrite what the draft has put in their place. A sequence's first token has no state before it, is
never run, and is seen by no other.

T flat tokens, N tokens whose logits are wanted, E numbers that are kept of a token's state, S numbers of the
target's states of a token, side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.attention.attention import LayerAttention
from specdist.models.attention.kernel import PagedKernel
from specdist.models.batch.flat import FlatBatch, PassOutputs, cache_indices, places_before
from specdist.models.cache.key_value import KeyValueCache, untouched_zeros
from specdist.models.draft_models.declaration import Drafter
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.models.passes.static import CarriedStates
from specdist.models.passes.torch_pass import NOT_ALLOCATED, TorchPass
from specdist.sampling.uploads import upload


class DrafterPass(TorchPass):
    """Its hidden states are the outputs that stand for the target's until the target has run the tokens."""

    kind: Drafter
    _states: Tensor | None = None

    def bind(self, cache: KeyValueCache, kernel: PagedKernel | None) -> None:
        super().bind(cache, kernel)
        num_places = len(cache.keys[0]) * cache.page_size
        num_kept = self.kind.num_kept_numbers(self._model.config)
        if num_kept:
            # The last one is never written.
            self._states = untouched_zeros((num_places + 1, num_kept), cache.dtype, self._device)
            self.no_state = num_places

    @torch.inference_mode()
    def receive(self, batch: FlatBatch, pages: np.ndarray, states_TS: Tensor) -> None:
        """The target's states after these tokens, whose slots have these pages."""
        assert self._states is not None, NOT_ALLOCATED
        own = states_TS.to(device=self._device, dtype=self._states.dtype)
        self._states[self.places(batch, pages)] = self.kept(own)

    def kept(self, states_TS: Tensor) -> Tensor:
        """[T, E]: what is kept of the target's states."""
        return states_TS

    def places(self, batch: FlatBatch, pages: np.ndarray) -> Tensor:
        """[T]: in the cache."""
        assert self._cache is not None, NOT_ALLOCATED
        return upload(self._device, cache_indices(batch, pages, self._cache.page_size))[0]

    @torch.inference_mode()
    def run(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, *, with_hidden: bool = False
    ) -> PassOutputs:
        assert self._cache is not None, NOT_ALLOCATED
        page_size = self._cache.page_size
        before_T, after_N, index_N, positions_T = upload(
            self._device,
            places_before(batch, pages_SP, page_size, self.no_state),
            cache_indices(batch, pages_SP, page_size)[asked_N],
            asked_N,
            batch.model_positions_T,
        )
        token_ids_T = torch.as_tensor(batch.token_ids_T, dtype=torch.int64, device=self._device)
        attention = CarriedStates(self._attention(batch, pages_SP), before_T, after_N)
        return self.compute(token_ids_T, positions_T, index_N, attention, with_hidden=with_hidden)

    @torch.inference_mode()
    def compute(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        logits_index_N: Tensor,
        attention: LayerAttention,
        *,
        with_hidden: bool = False,
    ) -> PassOutputs:
        """In the dry run there are no states."""
        del with_hidden
        if not isinstance(attention, CarriedStates):
            weight = self._model.get_input_embeddings().weight
            incoming_TE = weight.new_zeros(len(token_ids_T), self.kind.num_kept_numbers(self._model.config))
            return self.step(token_ids_T, positions_T, logits_index_N, attention, incoming_TE)
        assert self._states is not None, NOT_ALLOCATED
        incoming_TE = self._states[attention.before_T]
        outputs = self.step(token_ids_T, positions_T - 1, logits_index_N, attention, incoming_TE)
        assert outputs.hidden_NH is not None
        self._states[attention.after_N] = outputs.hidden_NH
        return outputs

    def step(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        logits_index_N: Tensor,
        attention: LayerAttention,
        incoming_TE: Tensor,
    ) -> PassOutputs:
        """The pass over tokens with the states before them, which are at these positions: logits [N, V] and
        output states [N, E]. N may be 0."""
        raise NotImplementedError


class DrafterRunner(ModelRunner):
    """Contexts, of which no logits are wanted, wait for the target's states: :meth:`receive`."""

    pass_class: type[DrafterPass] = DrafterPass
    reads_states = True

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        on_pass: Callable[[], None] | None = None,
        has_float8_cache: bool = False,
        acceleration: Acceleration | None = None,
    ) -> None:
        """``acceleration``: by default the best choice on the device."""
        self._waiting: list[FlatBatch] = []
        acceleration = acceleration or Acceleration.of(device, has_float8_cache=has_float8_cache)
        super().__init__(model, device, acceleration, model_impl="transformers", on_pass=on_pass)

    def receive(self, slots_T: np.ndarray, positions_T: np.ndarray, states_TS: Tensor) -> None:
        """The target's states after these tokens. The page table must be that of the pass that they are from.
        Then run the contexts of that pass."""
        assert isinstance(self.torch_pass, DrafterPass)
        self.torch_pass.receive(FlatBatch(slots_T, slots_T, positions_T), self.pages.pages, states_TS)
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            # Of lengths that hardly come again.
            self.forward_seen(self._for_layers(batch), self.pages.pages, np.zeros(0, np.int64))

    def drop_waiting(self) -> None:
        """The pass over the contexts that wait has failed."""
        self._waiting = []

    def forward(self, batch: FlatBatch, logits_index: Any) -> Tensor:
        if len(logits_index):
            return super().forward(batch, logits_index)
        self._waiting.append(batch)
        return torch.empty(0, self.model.config.get_text_config().vocab_size, device=self.device)
