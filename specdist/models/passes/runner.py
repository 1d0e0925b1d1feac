"""One model with its cache, and one function: a forward over a flat batch.

A pass runs in one of three ways. Short segments run as a recorded pass of fixed shapes where that is faster,
on CUDA; all others as the ragged batch that they are, by transformers' layers, or by compiled code on a CPU.
All give the same logits.

T flat tokens, N tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.config.groups import ModelImpl
from specdist.models.attention.attention import AttentionRules, LayerAttention
from specdist.models.attention.expanding import kind_of_expanded
from specdist.models.attention.expansion import Expansion
from specdist.models.attention.kernel import PagedKernel, SdpaKernel
from specdist.models.attention.latent import can_keep_latents, expansion_of
from specdist.models.attention.probe import ProbePages, choose_kernel
from specdist.models.attention.rope import use_frequencies_by_row
from specdist.models.batch.flat import FlatBatch, PassOutputs, for_layers, model_positions
from specdist.models.cache.branch_pages import BranchPageTable, TokenCopies, pages_per_branch
from specdist.models.cache.key_value import KeyValueCache
from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.windowed_pages import WindowedLayers
from specdist.models.families.dry_run import LayerShapes, positions_of, recording, refuse_foreign
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.compiled_check import choose_pass
from specdist.models.passes.graphs import CudaGraphs, GraphMemory
from specdist.models.passes.hidden import HiddenStateHead, with_head_logits
from specdist.models.passes.static import NUM_SCRATCH_PAGES, StaticPasses
from specdist.models.passes.static_runs import StaticRuns, num_run_inputs
from specdist.models.passes.torch_pass import NOT_ALLOCATED, Pass, TorchPass
from specdist.models.recurrent.rollback import NO_ROLLBACK, Rollback
from specdist.models.recurrent.states import RecurrentStates


class ModelRunner:
    """Runs a causal language model whose attention is ``specdist.models.attention.attention``.

    The page table is a copy of :class:`specdist.models.cache.pages.PageTable`, which sends updates.

    Attributes:
        reuses_logits: set by whoever asks for passes: those of one may be overwritten by the next.
        runs: several draft steps in one; None where each is a pass by itself.
        reads_states: of the target; ``drafts_blocks``: a round has one pass, over whole blocks.
    """

    reuses_logits = reads_states = drafts_blocks = False
    pass_class: type[TorchPass] = TorchPass

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        acceleration: Acceleration | None = None,
        *,
        model_impl: ModelImpl = "auto",
        head: HiddenStateHead | None = None,
        on_pass: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            acceleration: by default the best choice on the device.
            model_impl: whose layers run: ``specdist``, compiled code on a CPU, raises :class:`UserError` if
                it does not give transformers' logits; then ``auto`` is ``transformers``.
            on_pass: called after every pass, including those that record a graph.
            head: reads the last hidden states of every pass; it takes the model's precision.
        """
        self.model = model.eval()
        self.device = device
        self.dtype = next(model.parameters()).dtype
        self._head = None if head is None else head.to(device=device, dtype=self.dtype).eval()
        self._acceleration = acceleration or Acceleration.of(device)
        self._on_pass = on_pass
        keeps_latents = self._acceleration.keeps_latents and can_keep_latents(model)
        self._shapes = LayerShapes(positions_of(model), keeps_latents=keeps_latents)
        self.torch_pass = self.pass_class(model, device, self._shapes, is_fused=self._acceleration.is_fused)
        self.rope_border = use_frequencies_by_row(model)
        # A dry run of one token gives every layer's local shape, whatever the family and its sharding.
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        with recording(model, self._shapes):
            self.torch_pass.compute(zero, zero, zero, self._shapes)
        refuse_foreign(model, self._shapes, model.name_or_path)
        may_compile, is_wanted = self._acceleration.is_compiled, model_impl == "specdist"
        self.compiled: Pass | None = None
        if is_wanted or (may_compile and model_impl == "auto"):
            self.compiled = choose_pass(model, self._shapes, self.torch_pass.compute, may_compile, is_wanted)
        self._pass: Pass = self.compiled or self.torch_pass
        self._cache: KeyValueCache | None = None
        self._table: BranchPageTable | None = None
        self._expansion = expansion_of(model, self._shapes.rules)
        # By the size of pages.
        self._kernels: dict[tuple[int, Expansion | None], PagedKernel | None] = {}
        self._states: RecurrentStates | None = None
        self._static: StaticPasses | None = None
        self.runs: StaticRuns | None = None

    @property
    def is_asynchronous(self) -> bool:
        """A pass returns before it is done, and reading a result waits for it."""
        return self.device.type != "cpu"

    @property
    def rules(self) -> Mapping[int, AttentionRules]:
        """Of every layer's attention."""
        return self._shapes.rules

    @property
    def windows(self) -> dict[int, int | None]:
        """Of every layer: the last tokens that a token sees, if not all."""
        return {layer: rules.window for layer, rules in self.rules.items()}

    def bytes_per_page(self, page_size: int) -> int:
        """Memory of one page on this device, in bytes."""
        return self.windowed_page_bytes(page_size, self._shapes.shapes)

    @property
    def keeps_states(self) -> bool:
        """Of recurrent layers."""
        return bool(self._shapes.states)

    def state_bytes(self, rollback: Rollback) -> int:
        """Of a slot's states of recurrent layers, in bytes."""
        return sum(shape.num_bytes(rollback, self.dtype.itemsize) for shape in self._shapes.states.values())

    def windowed_page_bytes(self, page_size: int, layers: Collection[int]) -> int:
        """Of that, what these layers take."""
        own, is_float8 = [self._shapes.shapes[layer] for layer in layers], self._acceleration.has_float8_cache
        return KeyValueCache.bytes_per_page(own, page_size, self.dtype, is_float8)

    def has_kernel(self, page_size: int) -> bool:
        """Whether attention kernels of this device work with pages of this size; tried once. Ranks that share
        a model call it, or :meth:`allocate`, at the same time."""
        return self._kernel_for(page_size) is not None

    def _kernel_for(self, page_size: int, expansion: Expansion | None = None) -> PagedKernel | None:
        """With an ``expansion``, for what is expanded."""
        key, own, kinds = (page_size, expansion), self._acceleration, self._shapes.kinds
        if key not in self._kernels:
            is_float8 = own.has_float8_cache and expansion is None
            if expansion is not None:
                kinds = [kind_of_expanded(expansion, each) for each in kinds if each.rules.is_latent]
            pages = ProbePages(page_size, self.dtype, self.device, is_float8)
            self._kernels[key] = choose_kernel(own.kernels, kinds, pages, group=own.group)
        return self._kernels[key]

    def allocate(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_seq_len: int,
        num_branch_slots: int = 0,
        max_branch_tokens: int = 0,
        windowed: WindowedLayers | None = None,
        rollback: Rollback = NO_ROLLBACK,
        num_prefix_states: int = 0,
    ) -> None:
        """Allocate the cache, once: the slots' pages, and those of the branches after them. ``windowed``:
        layers that have pages of their own. ``rollback``: of recurrent layers' states: of all slots, and of
        some prefixes."""
        acceleration = self._acceleration
        if self._shapes.states:
            self._states = RecurrentStates(
                self._shapes.states,
                num_slots=num_slots + num_branch_slots,
                num_kept=num_prefix_states,
                rollback=rollback,
                dtype=self.dtype,
                device=self.device,
            )
            self.torch_pass.states = self._states
        is_static = acceleration.is_static and (self._states is None or self._states.can_be_recorded)
        num_scratch = NUM_SCRATCH_PAGES if is_static else 0
        num_windowed = 0 if windowed is None else windowed.num_pages
        num_all_pages = num_pages + num_branch_slots * pages_per_branch(max_branch_tokens, page_size)
        self._cache = KeyValueCache(
            self._shapes.shapes,
            num_pages=num_all_pages + num_scratch,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
            windowed=frozenset() if windowed is None else windowed.of(self.windows),
            num_windowed_pages=num_windowed + num_scratch,
            is_float8=acceleration.has_float8_cache,
        )
        self._table = BranchPageTable(
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=max_seq_len,
            num_branch_slots=num_branch_slots,
            max_branch_tokens=max_branch_tokens,
            has_windowed=windowed is not None,
        )
        kernel = self._kernel_for(page_size)
        self._pass.bind(self._cache, kernel)
        if self._expansion is not None:
            self.torch_pass.expand(self._expansion, self._kernel_for(page_size, self._expansion))
        if is_static:
            num_all_slots, width = self._table.pages.shape
            self._static = StaticPasses(
                self._compute,
                self._cache,
                kernel or SdpaKernel(),
                scratch_page=num_all_pages,
                windowed_scratch_page=None if windowed is None else num_windowed,
                most_segments=num_all_slots,
                table_width=width,
                device=self.device,
                capturer=acceleration.capturer,
                takes_features=self.head_uses_features,
                num_more_inputs=num_run_inputs(num_all_slots, bool(self._states)),
                states=self._states,
                no_state=self.torch_pass.no_state,
            )
            self.runs = StaticRuns(
                self._static,
                self._table,
                acceleration.capturer,
                self.dtype,
                self._head,
                self._on_pass,
                self.rope_border,
            )

    def limit_graphs(self, memory: GraphMemory) -> None:
        """Record no more graphs than this memory holds."""
        if isinstance(capturer := self._acceleration.capturer, CudaGraphs):
            capturer.memory = memory

    @property
    def pages(self) -> BranchPageTable:
        """To be told which sequences its slots have, and how far."""
        assert self._table is not None, NOT_ALLOCATED
        return self._table

    def update_pages(self, updates: PageUpdates) -> None:
        if self._states is not None:
            updates = self._states.update(updates)
        self.pages.update(updates)

    def open_branches(self, slots_B: np.ndarray, branches_B: np.ndarray, positions_B: np.ndarray) -> None:
        """Branch off each slot before a position, into a slot of its own after those of the sequences."""
        self._copy(self.pages.open(slots_B, branches_B, positions_B))
        if self._states is not None:
            self._states.copy(slots_B, branches_B)

    def adopt_branches(
        self, branches_B: np.ndarray, slots_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> None:
        """Let each slot take over ``lengths`` tokens of a branch, from position ``begins`` on."""
        self._copy(self.pages.adopt(branches_B, slots_B, begins_B, lengths_B))
        if self._states is not None:
            self._states.copy(branches_B, slots_B)

    def _copy(self, copies: TokenCopies) -> None:
        assert self._cache is not None, NOT_ALLOCATED
        places_T = (copies.sources_T, copies.targets_T)
        self._cache.copy_tokens(*(torch.from_numpy(each).to(self.device) for each in places_T))

    def assume_contexts(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """The next passes are only timed: as if so many tokens of each slot had been run."""
        if self._states is not None:
            self._states.assume(slots, lengths)

    def num_run(self, batch: FlatBatch) -> int:
        """Tokens of the pass that the last :meth:`forward` of this batch has made; 0 if it needed none."""
        return len(batch)

    def forward(self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
        """Run the tokens, write their keys and values; logits [N, V] of the tokens at ``logits_index``."""
        asked_N, pages_SP = np.asarray(logits_index, np.int64), self.pages.pages
        batch = self._for_layers(batch)
        outputs = self._recorded(batch, pages_SP, asked_N)
        if outputs is None:
            return self.forward_seen(batch, pages_SP, asked_N)
        return outputs if self._head is None else outputs[:, :-1]

    @property
    def has_head(self) -> bool:
        return self._head is not None

    @property
    def head_uses_features(self) -> bool:
        """Whether a pass needs the features of its tokens."""
        return self._head is not None and self._head.uses_features and not self._head.reads_drawing_state

    @property
    def head_reads_drawing_state(self) -> bool:
        return self._head is not None and self._head.reads_drawing_state

    @torch.inference_mode()
    def estimates_of_draws(self, estimates_N: Tensor, features_3N: Tensor) -> Tensor:
        assert self._head is not None
        return self._head.estimates_of_draws(estimates_N, features_3N)

    def forward_with_estimates(
        self,
        batch: FlatBatch,
        logits_index: Sequence[int] | np.ndarray,
        features_3N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Like :meth:`forward`, with the head's estimates of the same tokens: float64 [N] in [0, 1].

        Args:
            features_3N: of these tokens, float32, for a head that uses them. They are known before the pass:
                they describe the distributions that the tokens were drawn from.
        """
        assert self._head is not None
        assert (features_3N is not None) == self.head_uses_features, "the head's features, if it uses them"
        asked_N, pages_SP = np.asarray(logits_index, np.int64), self.pages.pages
        batch = self._for_layers(batch)
        outputs = self._recorded(batch, pages_SP, asked_N, features_3N)
        if outputs is None:
            outputs = self._with_estimates(*self._ragged(batch, pages_SP, asked_N, True), features_3N)
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

    def forward_seen(self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray) -> Tensor:
        """Like :meth:`forward`, over a table of pages that the caller has made: a ragged pass."""
        return self._ragged(batch, pages_SP, asked_N, False)[0]

    def _recorded(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, features_3N: Tensor | None = None
    ) -> Tensor | None:
        """Logits [N, V], or with a head [N, V + 1], the last column being the head's logit. Without the
        features that it uses, that column is meaningless. None if no recorded pass fits."""
        if self._static is None or self.torch_pass.expanded_segments(batch) is not None:
            return None
        outputs = self._static.forward(
            batch, asked_N, pages_SP, features_3N, is_copied=not self.reuses_logits
        )
        if outputs is not None:
            self._count_pass()  # a replay runs no model
        return outputs

    def _ragged(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, with_hidden: bool
    ) -> PassOutputs:
        assert self._cache is not None, NOT_ALLOCATED
        outputs = self._pass.run(batch, pages_SP, asked_N, with_hidden=with_hidden)
        self._count_pass()
        return outputs

    def _count_pass(self) -> None:
        if self._on_pass is not None:
            self._on_pass()

    def _compute(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        logits_index_N: Tensor,
        attention: LayerAttention,
        features_3N: Tensor | None = None,
    ) -> Tensor:
        """What is recorded: see :meth:`_recorded`."""
        outputs = self.torch_pass.compute(
            token_ids_T, positions_T, logits_index_N, attention, with_hidden=self._head is not None
        )
        self._count_pass()
        return self._with_estimates(*outputs, features_3N)

    @torch.inference_mode()
    def _with_estimates(
        self, logits_NV: Tensor, hidden_NH: Tensor | None, features_3N: Tensor | None
    ) -> Tensor:
        if self._head is None:
            return logits_NV
        assert hidden_NH is not None
        if self.head_uses_features and features_3N is None:
            features_3N = torch.zeros(3, len(logits_NV), device=self.device)
        return with_head_logits(logits_NV, self._head, hidden_NH, features_3N)

    def _for_layers(self, batch: FlatBatch) -> FlatBatch:
        return for_layers(batch, self.pages, self.rope_border)

    def model_positions(self, slots_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
        """Positions in the slots' sequences as the model's layers know them."""
        return model_positions(slots_T, positions_T, self.pages, self.rope_border)
