"""A pass of the model's own layers, in plain torch or with kernels: a flat batch as it is.

T flat tokens, N tokens whose logits are wanted, V vocabulary, H hidden size.
"""

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.attention.attention import GroupedAttention, LayerAttention, PagedAttention, attending
from specdist.models.attention.expanding import ExpandedAttention, expanding_segments
from specdist.models.attention.expansion import Expansion
from specdist.models.attention.kernel import KernelAttention, PagedKernel
from specdist.models.batch.flat import (
    FlatBatch,
    PassOutputs,
    Segments,
    plan_attention,
    ragged_segments,
    slot_mapping,
)
from specdist.models.cache.key_value import KeyValueCache
from specdist.models.cpu.linear import OneDnnLinears
from specdist.models.families.dry_run import LayerShapes
from specdist.models.passes.fusing import FusedLayers
from specdist.models.passes.hidden import LastHiddenStates, StateReader
from specdist.models.recurrent.states import RecurrentStates, StatePass

NOT_ALLOCATED = "allocate() must be called first"


class Pass(Protocol):
    """One way to run a flat batch: :class:`TorchPass`, or compiled code on a CPU. Recorded ones, of fixed
    shapes, are :class:`specdist.models.passes.static.StaticPasses`."""

    def bind(self, cache: KeyValueCache, kernel: PagedKernel | None) -> None:
        """Write keys and values into this cache from now on; ``kernel``: for attention, None for plain
        torch."""
        ...

    def run(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, *, with_hidden: bool = False
    ) -> PassOutputs:
        """Run the tokens, which see the pages of their slots, and write their keys and values."""
        ...


class TorchPass:
    """The model's layers by transformers. What makes them faster is switched on for the pass alone: other
    code may share the model.

    Attributes:
        states: of recurrent layers, if the model has any.
        reader: of a target whose states a draft reads.
        no_state: of a drafter, where it finds a state that is never written.
    """

    states: RecurrentStates | None = None
    reader: StateReader | None = None
    no_state: int | None = None

    def __init__(
        self, model: PreTrainedModel, device: torch.device, shapes: LayerShapes, *, is_fused: bool
    ) -> None:
        self._model = model
        self._device = device
        self._shapes = shapes
        self._takes_index = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self._linears = OneDnnLinears(model) if device.type == "cpu" else None
        dtype = next(model.parameters()).dtype
        self._fused = FusedLayers(model, device, dtype) if is_fused else None
        self._cache: KeyValueCache | None = None
        self._kernel: PagedKernel | None = None
        self._expansion: Expansion | None = None
        self._expanded_kernel: PagedKernel | None = None

    def bind(self, cache: KeyValueCache, kernel: PagedKernel | None) -> None:
        self._cache, self._kernel = cache, kernel

    def run(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, *, with_hidden: bool = False
    ) -> PassOutputs:
        # The output head needs at least one token; its logits are dropped if none are wanted.
        kept_N = asked_N if len(asked_N) else np.zeros(1, np.int64)
        logits_NV, hidden_NH = self.compute(
            torch.as_tensor(batch.token_ids_T, dtype=torch.int64, device=self._device),
            torch.as_tensor(batch.model_positions_T, dtype=torch.int64, device=self._device),
            torch.from_numpy(kept_N).to(self._device),
            self.attention(batch, pages_SP),
            with_hidden=with_hidden,
        )
        num_asked = len(asked_N)
        return PassOutputs(logits_NV[:num_asked], None if hidden_NH is None else hidden_NH[:num_asked])

    def expand(self, expansion: Expansion, kernel: PagedKernel | None) -> None:
        """Let segments expand latents where that pays; ``kernel``: for attention to them."""
        self._expansion, self._expanded_kernel = expansion, kernel
        self._fewest_queries = expansion.fewest_queries

    def expanded_segments(self, batch: FlatBatch) -> tuple[Segments, np.ndarray] | None:
        """The batch's segments, and the numbers of those that expand latents; None if none does."""
        if self._expansion is None or len(batch) <= self._fewest_queries:
            return None
        segments = Segments.of(batch)
        chosen = expanding_segments(self._expansion, segments)
        return (segments, chosen) if len(chosen) else None

    def attention(self, batch: FlatBatch, pages_SP: np.ndarray) -> LayerAttention:
        """The attention of a pass over the cache."""
        found = self.expanded_segments(batch)
        if found is None:
            return self._attention(batch, pages_SP)
        assert self._cache is not None and self._expansion is not None
        segments, chosen = found
        is_other_T = ~np.isin(np.arange(len(segments.lengths_S)), chosen).repeat(segments.lengths_S)
        others_N = np.flatnonzero(is_other_T)
        others = FlatBatch(others_N, batch.slots_T[others_N], batch.positions_T[others_N])
        page_size = self._cache.page_size
        index_T = torch.from_numpy(slot_mapping(batch, pages_SP, page_size)).to(self._device)
        attention = ExpandedAttention(
            self._cache,
            self._expanded_kernel,
            self._expansion,
            index_T,
            of_all=partial(self._attention, batch, pages_SP),
            of_others=self._over(others, pages_SP) if len(others) else None,
            others_N=torch.from_numpy(others_N).to(self._device),
        )
        for index in chosen:
            begin, num_queries, num_keys = (
                int(each[index]) for each in (segments.starts_S, segments.lengths_S, segments.num_keys_S)
            )
            attention.add(
                begin, num_queries, num_keys, pages_SP[batch.slots_T[begin], : -(-num_keys // page_size)]
            )
        return attention

    def _attention(self, batch: FlatBatch, pages_SP: np.ndarray) -> LayerAttention:
        assert self._cache is not None, NOT_ALLOCATED
        attention, windowed_SP = self._over(batch, pages_SP), batch.windowed_pages_SP
        if windowed_SP is not None:
            attention = GroupedAttention(self._cache.windowed, self._over(batch, windowed_SP), attention)
        if self.states is None:
            return attention
        return StatePass(attention, self.states, self.states.places(batch))

    def _over(self, batch: FlatBatch, pages_SP: np.ndarray) -> LayerAttention:
        assert self._cache is not None, NOT_ALLOCATED
        page_size = self._cache.page_size
        if self._kernel is None:
            return PagedAttention(self._cache, plan_attention(batch, pages_SP, page_size, self._device))
        segments, cache_index_T = ragged_segments(batch, pages_SP, page_size, self._device)
        return KernelAttention(self._cache, self._kernel, segments, cache_index_T)

    def fused(self) -> contextlib.AbstractContextManager[None]:
        """A context in which layers run by fused kernels, where there are any."""
        return contextlib.nullcontext() if self._fused is None else self._fused.active()

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
        """The pass with what it reads on the device, so that it can be recorded."""
        with contextlib.ExitStack() as stack:
            if self._linears is not None:
                stack.enter_context(self._linears.active())
            if self.reader is not None:
                stack.enter_context(self.reader.reading(len(token_ids_T)))
            stack.enter_context(self.fused())
            kept: dict[str, Tensor] = {}
            if self._takes_index:
                kept["logits_to_keep"] = logits_index_N
            else:  # some models of texts and sounds; what others do not know they ignore
                head = self._model.get_output_embeddings()
                hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, logits_index_N],))
                stack.callback(hook.remove)
            caught = stack.enter_context(LastHiddenStates(self._model)) if with_hidden else None
            shapes = self._shapes
            stack.enter_context(attending(attention, shapes.rules, keeps_latents=shapes.keeps_latents))
            output: Any = self._model(
                input_ids=token_ids_T[None],
                position_ids=positions_T[None],
                use_cache=False,
                **kept,
            )
        return PassOutputs(output.logits[0], None if caught is None else caught.hidden_NH)
