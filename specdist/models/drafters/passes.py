"""Passes of a drafter: over tokens with the target's states before them, or over whole blocks.

A token is run at its own position with the state of the token before it. States lie in pages as keys and
values do, so that shared prefixes, preemptions and rejections need no bookkeeping of their own: the target's
states overwrite what the draft has put in their place. A sequence's first token has no state before it, is
never run, and is seen by no other.

Of a block drafter's contexts only keys and values are made, of the target's states as soon as these arrive;
they overwrite those of a block.

T flat tokens, N tokens whose logits are wanted, E numbers that are kept of a token's state, S numbers of the
target's states of a token, side by side, v vocabulary of the draft.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.attention.attention import AttentionCall, AttentionRules, LayerAttention, attending
from specdist.models.attention.kernel import PagedKernel
from specdist.models.batch.flat import FlatBatch, PassOutputs, previous_slots, slot_mapping
from specdist.models.cache.key_value import KeyValueCache, untouched_zeros
from specdist.models.draft_models.block import BlockDrafter
from specdist.models.draft_models.eagle3 import LlamaForCausalLMEagle3
from specdist.models.draft_models.mtp import joining
from specdist.models.passes.static import CarriedStates
from specdist.models.passes.torch_pass import NOT_ALLOCATED, TorchPass
from specdist.sampling.uploads import upload

EAGLE_RULES = AttentionRules(scale=None, window=None, softcap=None, hides_first=True)
# Every token of a block sees the context of its sequence, and the whole block.
BLOCK_RULES = AttentionRules(scale=None, window=None, softcap=None, is_causal=False)


class StepInputs(NamedTuple):
    """Tokens, the positions of the states before them, the tokens that are asked for, and these states."""

    token_ids_T: Tensor
    positions_T: Tensor
    index_N: Tensor
    attention: LayerAttention
    incoming_TE: Tensor


class DrafterLayers(Protocol):
    """The layers of one kind of drafters, in a pass over tokens with the states before them.

    Attributes:
        mask_state: [E] before tokens that are not known yet, if any are run.
    """

    mask_state: Tensor | None

    def kept(self, states_TS: Tensor) -> Tensor:
        """[T, E]: what is kept of the target's states."""
        ...

    def step(self, own: TorchPass, inputs: StepInputs) -> PassOutputs:
        """The pass ``own`` over tokens with the states before them: logits [N, V], and output states [N, E],
        which stand for the target's until the target has run the tokens. N may be 0."""
        ...


class Eagle3Layers:
    """The layers of EAGLE-3. The last layer makes keys and values alone of contexts.

    P-EAGLE's, which have a state for masks, give in the place of logits their output states beside logits of
    the draft's vocabulary: [N, E + v].
    """

    def __init__(self, model: LlamaForCausalLMEagle3) -> None:
        self._model = model
        self.mask_state: Tensor | None = None
        if hasattr(model, "mask_hidden"):
            with torch.inference_mode():
                self.mask_state = model.fused(model.mask_hidden[0])[0]

    def kept(self, states_TS: Tensor) -> Tensor:
        return self._model.fused(states_TS)

    def step(self, own: TorchPass, inputs: StepInputs) -> PassOutputs:
        token_ids_T, positions_T, index_N, attention, incoming_TE = inputs

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attention.attend(layer, AttentionCall(queries, keys, values, EAGLE_RULES))

        model = self._model
        with own.fused(), attending(attention, {}):
            outgoing_NE = model.draft(token_ids_T, incoming_TE, model.rotation(positions_T), index_N, attend)
        if self.mask_state is None:
            return PassOutputs(model.logits(outgoing_NE), outgoing_NE)
        return PassOutputs(torch.cat([outgoing_NE, model.own_logits(outgoing_NE)], dim=-1), outgoing_NE)


class MtpLayers:
    """The layers of a checkpoint's MTP head: a model of one layer, with the attention, experts and cache of
    its family. Its hidden states are what its output head reads, as the target's are."""

    mask_state: Tensor | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def kept(self, states_TS: Tensor) -> Tensor:
        return states_TS

    def step(self, own: TorchPass, inputs: StepInputs) -> PassOutputs:
        num_asked = len(inputs.index_N)
        if not num_asked:  # the output head needs at least one token
            inputs = inputs._replace(index_N=torch.zeros_like(inputs.token_ids_T[:1]))
        with joining(self._model, inputs.incoming_TE):
            logits_NV, hidden_NE = TorchPass.compute(own, *inputs[:4], with_hidden=True)
        assert hidden_NE is not None
        return PassOutputs(logits_NV[:num_asked], hidden_NE[:num_asked])


class DrafterPass(TorchPass):
    """A pass over tokens, each with the state of the token before it."""

    _kept: Tensor | None = None

    def __init__(self, *args: Any, layers: DrafterLayers, num_kept: int, **options: Any) -> None:
        """``num_kept``: E."""
        super().__init__(*args, **options)
        self._layers, self._num_kept = layers, num_kept

    def bind(self, cache: KeyValueCache, kernel: PagedKernel | None) -> None:
        super().bind(cache, kernel)
        # The last one is never written.
        self.no_state = len(cache.keys[0]) * cache.page_size
        self._kept = untouched_zeros((self.no_state + 1, self._num_kept), cache.dtype, self._device)
        if self._layers.mask_state is not None:
            self._kept[self.no_state] = self._layers.mask_state.to(cache.dtype)

    @torch.inference_mode()
    def receive(self, batch: FlatBatch, pages_SP: np.ndarray, states_TS: Tensor) -> None:
        """The target's states after these tokens, whose slots have these pages."""
        assert self._cache is not None and self._kept is not None, NOT_ALLOCATED
        own_TS = states_TS.to(device=self._device, dtype=self._kept.dtype)
        self._kept[places_of(batch, pages_SP, self._cache, self._device)] = self._layers.kept(own_TS)

    @torch.inference_mode()
    def run(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, *, with_hidden: bool = False
    ) -> PassOutputs:
        assert self._cache is not None, NOT_ALLOCATED
        page_size = self._cache.page_size
        before_T, after_N, index_N, positions_T = upload(
            self._device,
            previous_slots(batch, pages_SP, page_size, self.no_state),
            slot_mapping(batch, pages_SP, page_size)[asked_N],
            asked_N,
            batch.model_positions_T,
        )
        token_ids_T = torch.as_tensor(batch.token_ids_T, dtype=torch.int64, device=self._device)
        attention = CarriedStates(self.attention(batch, pages_SP), before_T, after_N)
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
        """Compute a pass; in the dry run there are no states."""
        del with_hidden
        if not isinstance(attention, CarriedStates):
            weight = self._model.get_input_embeddings().weight
            none_TE = weight.new_zeros(len(token_ids_T), self._num_kept)
            inputs = StepInputs(token_ids_T, positions_T, logits_index_N, attention, none_TE)
            return self._layers.step(self, inputs)
        assert self._kept is not None, NOT_ALLOCATED
        before_TE = self._kept[attention.before_T]
        inputs = StepInputs(token_ids_T, positions_T - 1, logits_index_N, attention, before_TE)
        outputs = self._layers.step(self, inputs)
        assert outputs.hidden_NH is not None
        self._kept[attention.after_N] = outputs.hidden_NH
        return outputs


class BlockPass(TorchPass):
    """A pass over whole blocks."""

    _model: BlockDrafter

    @torch.inference_mode()
    def receive(self, batch: FlatBatch, pages_SP: np.ndarray, states_TS: Tensor) -> None:
        """The target's states after these tokens, whose slots have these pages."""
        assert self._cache is not None, NOT_ALLOCATED
        places_T = places_of(batch, pages_SP, self._cache, self._device)
        positions_T = upload(self._device, batch.positions_T)[0]
        own_TS = states_TS.to(device=self._device, dtype=self._cache.dtype)
        for layer, (keys, values) in enumerate(self._model.contexts(own_TS, positions_T)):
            self._cache.write(layer, places_T, keys, values)

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
        """Compute, in the place of logits, output states beside logits of the draft's vocabulary: [N, E +
        v]."""
        del with_hidden

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attention.attend(layer, AttentionCall(queries, keys, values, BLOCK_RULES))

        with self.fused(), attending(attention, {}):
            hidden_NE = self._model.block(token_ids_T, positions_T, attend)[logits_index_N]
        return PassOutputs(torch.cat([hidden_NE, self._model.lm_head(hidden_NE)], dim=-1), None)


def places_of(batch: FlatBatch, pages_SP: np.ndarray, cache: KeyValueCache, device: torch.device) -> Tensor:
    """[T]: where the tokens' keys and values lie."""
    return upload(device, slot_mapping(batch, pages_SP, cache.page_size))[0]
