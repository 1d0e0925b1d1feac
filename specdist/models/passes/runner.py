"""One model with its cache, and one function: a forward over a flat batch.

A pass runs in one of three ways. Short segments run as a recorded pass of fixed shapes where that is faster,
on CUDA; all others as the ragged batch that they are, by transformers' layers, or by compiled code on a CPU.
All give the same logits.

T flat tokens, N tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.config.groups import ModelImpl
from specdist.models.attention.attention import LayerAttention
from specdist.models.attention.kernel import SdpaKernel
from specdist.models.attention.latent import can_keep_latents, expansion_of
from specdist.models.attention.rope import use_frequencies_by_row
from specdist.models.batch.flat import FlatBatch, PassOutputs, for_layers
from specdist.models.cache.key_value import BranchPageTable
from specdist.models.cache.pages import PageUpdates
from specdist.models.draft_models.declaration import ReadStates
from specdist.models.families.dry_run import LayerShapes, positions_of, recording, refuse_foreign
from specdist.models.passes.acceleration import Acceleration, AttentionKernels
from specdist.models.passes.all_reduce import SUMMING
from specdist.models.passes.compiled_check import choose_pass
from specdist.models.passes.graphs import GraphMemory
from specdist.models.passes.hidden import HiddenStateHead, StateReader
from specdist.models.passes.model_cache import CacheSizes, ModelCache
from specdist.models.passes.products import choose_products
from specdist.models.passes.static import StaticPasses
from specdist.models.passes.static_runs import StaticRuns, num_run_inputs
from specdist.models.passes.torch_pass import NOT_ALLOCATED, Pass, TorchPass


class ModelRunner:
    """Runs a causal language model whose attention is ``specdist.models.attention.attention``.

    Attributes:
        head: a trained head that every pass runs, too.
        reader: reads states of the target's layers for a draft.
        reuses_logits: set by whoever asks for passes: those of one may be overwritten by the next.
        runs: several draft steps in one; None where each is a pass by itself.
    """

    reuses_logits = False
    reader: StateReader | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        acceleration: Acceleration | None = None,
        *,
        model_impl: ModelImpl = "auto",
        head: HiddenStateHead | None = None,
        reads: ReadStates | None = None,
        on_pass: Callable[[], None] | None = None,
        make_pass: Callable[..., TorchPass] = TorchPass,
    ) -> None:
        """
        Args:
            acceleration: by default the best choice on the device.
            model_impl: whose layers run: ``specdist``, compiled code on a CPU, raises :class:`UserError` if
                it does not give transformers' logits; then ``auto`` is ``transformers``.
            head: reads the last hidden states of every pass; it takes the model's precision.
            reads: states that a draft reads. Compiled code leaves none: transformers' layers run.
            on_pass: called after every pass, including those that record a graph.
            make_pass: of the model's own layers, as :class:`TorchPass`.
        """
        self.model = model.eval()
        self.device = device
        self.dtype = next(model.parameters()).dtype
        self.head = None if head is None else head.to(device=device, dtype=self.dtype).eval()
        acceleration = acceleration or Acceleration.of(device)
        if reads is not None:
            acceleration, model_impl = dataclasses.replace(acceleration, is_compiled=False), "transformers"
        self._acceleration = acceleration
        self._on_pass = on_pass or (lambda: None)
        keeps_latents = acceleration.keeps_latents and can_keep_latents(model)
        self._shapes = LayerShapes(positions_of(model), keeps_latents=keeps_latents)
        self.torch_pass = make_pass(model, device, self._shapes, is_fused=acceleration.is_fused)
        if acceleration.capturer is not None:
            group, frozen = acceleration.group, acceleration.products
            choose_products(model, dtype=self.dtype, device=device, group=group, frozen=frozen)
        self.rope_border = use_frequencies_by_row(model)
        # A dry run of one token gives every layer's local shape, whatever the family and its sharding.
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        with recording(model, self._shapes):
            self.torch_pass.compute(zero, zero, zero, self._shapes)
        refuse_foreign(model, self._shapes, model.name_or_path)
        if reads is not None:
            self.reader = self.torch_pass.reader = StateReader(model, reads)
        self._kernels = AttentionKernels(acceleration, self._shapes, self.dtype, device)
        may_compile, is_wanted = acceleration.is_compiled, model_impl == "specdist"
        self.compiled: Pass | None = None
        if is_wanted or (may_compile and model_impl == "auto"):
            self.compiled = choose_pass(model, self._shapes, self.torch_pass.compute, may_compile, is_wanted)
        self._pass: Pass = self.compiled or self.torch_pass
        self._cache: ModelCache | None = None
        self._expansion = expansion_of(model, self._shapes.rules)
        self._static: StaticPasses | None = None
        self.runs: StaticRuns | None = None

    @property
    def is_asynchronous(self) -> bool:
        """A pass returns before it is done, and reading a result waits for it."""
        return self.device.type != "cpu"

    @property
    def windows(self) -> dict[int, int | None]:
        return self._shapes.windows

    @property
    def keeps_states(self) -> bool:
        """Whether there are states of recurrent layers."""
        return bool(self._shapes.states)

    def has_kernel(self, page_size: int) -> bool:
        """Whether attention kernels of this device work with pages of this size; tried once. Ranks that share
        a model call it, or :meth:`allocate`, at the same time."""
        return self._kernels.of(page_size) is not None

    def allocate(self, **sizes: Any) -> None:
        """Allocate the cache, once; ``sizes``: fields of :class:`CacheSizes`."""
        own, acceleration = CacheSizes(**sizes), self._acceleration
        cache = self._cache = ModelCache(
            self._shapes,
            own,
            dtype=self.dtype,
            device=self.device,
            is_float8=acceleration.has_float8_cache,
            may_be_recorded=acceleration.is_static,
        )
        self.torch_pass.states = cache.states
        kernel = self._kernels.of(own.page_size)
        self._pass.bind(cache.key_value, kernel)
        if self._expansion is not None:
            self.torch_pass.expand(self._expansion, self._kernels.of(own.page_size, self._expansion))
        if cache.is_recorded:
            self._static = StaticPasses(
                self._compute,
                cache,
                kernel or SdpaKernel(),
                device=self.device,
                capturer=acceleration.capturer,
                takes_features=self.head is not None and self.head.takes_features,
                num_more_inputs=num_run_inputs(len(cache.table.pages), cache.states is not None),
                no_state=self.torch_pass.no_state,
            )
            self.runs = StaticRuns(
                self._static, acceleration.capturer, self.dtype, self.head, self._on_pass, self.rope_border
            )

    def limit_graphs(self, memory: GraphMemory) -> None:
        """Record no more graphs than this memory holds."""
        if self._acceleration.capturer is not None:
            self._acceleration.capturer.memory = memory

    @property
    def cache(self) -> ModelCache:
        """What it keeps of its sequences."""
        assert self._cache is not None, NOT_ALLOCATED
        return self._cache

    @property
    def pages(self) -> BranchPageTable:
        """The page table, which is told which sequences its slots have, and how far."""
        return self.cache.table

    def update_pages(self, updates: PageUpdates) -> None:
        self.cache.update_pages(updates)

    def assume_contexts(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """The next passes are only timed: as if so many tokens of each slot had been run."""
        if self.cache.states is not None:
            self.cache.states.assume(slots, lengths)

    def check(self) -> None:
        """Raises RuntimeError if a pass that has ended has waited for another rank in vain."""
        sums = vars(self.model).get(SUMMING)
        if sums is not None:
            sums.check()

    def num_run(self, batch: FlatBatch) -> int:
        """Tokens of the pass that the last :meth:`forward` of this batch has made; 0 if it needed none."""
        return len(batch)

    def forward(self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
        """Run the tokens, write their keys and values; logits [N, V] of the tokens at ``logits_index``."""
        self.check()
        if self.reader is not None:
            self.reader.last = None
        asked_N, pages_SP = np.asarray(logits_index, np.int64), self.pages.pages
        logits_NV = self.forward_over(self._for_layers(batch), pages_SP, asked_N)
        if self.reader is not None:
            self.reader.keep(batch)
        return logits_NV

    def forward_over(self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray) -> Tensor:
        """Like :meth:`forward`, over a table of pages that the caller has made, and with positions as the
        model's layers know them."""
        outputs = self._recorded(batch, pages_SP, asked_N)
        if outputs is None:
            return self._ragged(batch, pages_SP, asked_N, False)[0]
        return outputs if self.head is None else outputs[:, :-1]

    def forward_with_estimates(
        self,
        batch: FlatBatch,
        logits_index: Sequence[int] | np.ndarray,
        features_3N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Like :meth:`forward`, with the head's estimates of the same tokens: float64 [N] in [0, 1].

        Args:
            features_3N: of these tokens, float32, for a head that takes them. They are known before the pass:
                they describe the distributions that the tokens were drawn from.
        """
        assert self.head is not None
        assert (features_3N is not None) == self.head.takes_features, "the head's features, if it takes them"
        asked_N, pages_SP = np.asarray(logits_index, np.int64), self.pages.pages
        batch = self._for_layers(batch)
        outputs = self._recorded(batch, pages_SP, asked_N, features_3N)
        if outputs is None:
            outputs = self.head.with_logits(self._ragged(batch, pages_SP, asked_N, True), features_3N)
        return outputs[:, :-1], outputs[:, -1].double().sigmoid()

    def forward_with_hidden(
        self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Like :meth:`forward`, with the tokens' last hidden states [N, H]: what the output head gets, after
        the final norm. Always a ragged pass: a recorded one runs no hook."""
        asked_N = np.asarray(logits_index, np.int64)
        logits_NV, hidden_NH = self._ragged(self._for_layers(batch), self.pages.pages, asked_N, True)
        assert hidden_NH is not None
        return logits_NV, hidden_NH

    def _recorded(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, features_3N: Tensor | None = None
    ) -> Tensor | None:
        """Logits [N, V], or with a head as of :meth:`HiddenStateHead.with_logits`; None if none fits."""
        if self._static is None or self.torch_pass.expanded_segments(batch) is not None:
            return None
        outputs = self._static.forward(
            batch, asked_N, pages_SP, features_3N, is_copied=not self.reuses_logits
        )
        if outputs is not None:
            self._on_pass()  # a replay runs no model
        return outputs

    def _ragged(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, with_hidden: bool
    ) -> PassOutputs:
        outputs = self._pass.run(batch, pages_SP, asked_N, with_hidden=with_hidden)
        self._on_pass()
        return outputs

    def _compute(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        logits_index_N: Tensor,
        attention: LayerAttention,
        features_3N: Tensor | None = None,
    ) -> Tensor:
        """What is recorded: see :meth:`_recorded`."""
        inputs, with_hidden = (token_ids_T, positions_T, logits_index_N, attention), self.head is not None
        outputs = self.torch_pass.compute(*inputs, with_hidden=with_hidden)
        self._on_pass()
        return outputs[0] if self.head is None else self.head.with_logits(outputs, features_3N)

    def _for_layers(self, batch: FlatBatch) -> FlatBatch:
        return for_layers(batch, self.pages, self.rope_border)
