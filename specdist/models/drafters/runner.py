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
from specdist.models.cache.key_value import KeyValueCache, untouched_zeros
from specdist.models.drafters.declaration import Drafter
from specdist.models.passes.flat import FlatBatch, SeenKeys, cache_indices
from specdist.models.passes.runner import Acceleration, ModelRunner
from specdist.models.passes.torch_pass import NOT_ALLOCATED, PassOutputs, TorchPass


class DrafterPass(TorchPass):
    """Its hidden states are the outputs that stand for the target's until the target has run the tokens."""

    kind: Drafter
    _states: Tensor | None = None

    def bind(self, cache: KeyValueCache, kernel: PagedKernel | None) -> None:
        super().bind(cache, kernel)
        num_places = len(cache.keys[0]) * cache.page_size
        num_kept = self.kind.num_kept_numbers(self._model.config)
        if num_kept:
            self._states = untouched_zeros((num_places, num_kept), cache.dtype, self._device)

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
        return torch.from_numpy(cache_indices(batch, pages, self._cache.page_size)).to(self._device)

    @torch.inference_mode()
    def run(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, *, with_hidden: bool = False
    ) -> PassOutputs:
        del with_hidden
        assert self._states is not None, NOT_ALLOCATED
        before_T = np.maximum(batch.positions_T - 1, 0)
        incoming_TE = self._states[self.places(FlatBatch(before_T, batch.slots_T, before_T), pages_SP)]
        index_N = torch.from_numpy(asked_N).to(self._device)
        outputs = self.step(
            torch.as_tensor(batch.token_ids_T, dtype=torch.int64, device=self._device),
            torch.from_numpy(before_T).to(self._device),
            index_N,
            self.attention_to(batch, pages_SP, asked_N),
            incoming_TE,
        )
        assert outputs.hidden_NH is not None
        self._states[self.places(batch, pages_SP)[index_N]] = outputs.hidden_NH
        return outputs

    def attention_to(self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray) -> LayerAttention:
        """Of a pass over the cache; first tokens are hidden: :class:`WithoutFirst`."""
        raise NotImplementedError

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
        """The dry run: there are no states."""
        del with_hidden
        num_kept = self.kind.num_kept_numbers(self._model.config)
        weight = self._model.get_input_embeddings().weight
        incoming_TE = weight.new_zeros(len(token_ids_T), num_kept)
        return self.step(token_ids_T, positions_T, logits_index_N, attention, incoming_TE)


class DrafterRunner(ModelRunner):
    """Contexts, of which no logits are wanted, wait for the target's states: :meth:`receive`."""

    pass_class: type[DrafterPass] = DrafterPass

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        on_pass: Callable[[], None] | None = None,
        has_float8_cache: bool = False,
    ) -> None:
        self._waiting: list[FlatBatch] = []
        acceleration = Acceleration(has_float8_cache=has_float8_cache)
        super().__init__(model, device, acceleration, model_impl="transformers", on_pass=on_pass)

    @property
    def drafts_blocks(self) -> bool:
        """Whether the first step of a round is a pass over whole blocks, and the only one."""
        return self.pass_class.kind.drafts_blocks

    def num_run(self, batch: FlatBatch) -> int:
        """Tokens of the pass that the last :meth:`forward` of this batch has made; 0 if it needed none."""
        return len(batch)

    def bytes_per_page(self, page_size: int) -> int:
        own = self.pass_class.kind.num_kept_numbers(self.model.config)
        return super().bytes_per_page(page_size) + page_size * own * self.dtype.itemsize

    def receive(self, slots_T: np.ndarray, positions_T: np.ndarray, states_TS: Tensor) -> None:
        """The target's states after these tokens. The page table must be that of the pass that they are from.
        Then run the contexts of that pass."""
        assert isinstance(self.torch_pass, DrafterPass)
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
        return torch.empty(0, self.model.config.get_text_config().vocab_size, device=self.device)


class WithoutFirst(SeenKeys):
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
