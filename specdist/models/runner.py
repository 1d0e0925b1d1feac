"""One model and its share of the cache, behind one function: a forward over a flat batch.

T flat tokens, N tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.cache.pages import PageUpdates
from specdist.errors import UserError
from specdist.models.attention import KeyValueCache, LayerAttention, LayerShapes, PagedAttention
from specdist.models.flat import FlatBatch, plan_attention
from specdist.models.forks import ForkedTable, TokenCopies, pages_per_branch
from specdist.models.linear import OneDnnLinears

NOT_ALLOCATED = "allocate() comes first"


class ModelRunner:
    """Runs a causal language model whose attention is ``specdist.models.attention``.

    The page table here is a copy: :class:`specdist.cache.pages.PageTable` owns the pages and sends updates.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model.eval()
        self.device = device
        self.dtype = next(model.parameters()).dtype
        self._linears = OneDnnLinears(model) if device.type == "cpu" else None
        self._shapes = LayerShapes()
        # A dry run of one token tells every layer's local shape, whatever the family and its sharding.
        self._run(np.zeros(1, np.int64), np.zeros(1, np.int64), [0], self._shapes)
        num_layers = model.config.get_text_config().num_hidden_layers
        if len(self._shapes.shapes) != num_layers or self._shapes.foreign:
            reason = ", ".join(sorted(self._shapes.foreign)) or (
                f"only {len(self._shapes.shapes)} of {num_layers} layers have attention"
            )
            raise UserError(
                f"{model.name_or_path} is of the family {model.config.model_type}, whose attention specdist "
                f"does not implement ({reason}): choose a model of another family (Llama, Qwen, Gemma, ...)"
            )
        self._cache: KeyValueCache | None = None
        self._table: ForkedTable | None = None

    def bytes_per_page(self, page_size: int) -> int:
        """Memory of one page on this device, in bytes."""
        return KeyValueCache.bytes_per_page(self._shapes.shapes, page_size, self.dtype)

    def allocate(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_seq_len: int,
        num_branch_rows: int = 0,
        max_branch_tokens: int = 0,
    ) -> None:
        """Take the cache's memory, once: the slots' pages, and those of the branches behind them."""
        num_own_pages = num_branch_rows * pages_per_branch(max_branch_tokens, page_size)
        self._cache = KeyValueCache(
            self._shapes.shapes,
            num_pages=num_pages + num_own_pages,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )
        self._table = ForkedTable(
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=max_seq_len,
            num_branch_rows=num_branch_rows,
            max_branch_tokens=max_branch_tokens,
        )

    def update_pages(self, updates: PageUpdates) -> None:
        assert self._table is not None, NOT_ALLOCATED
        self._table.pages[updates.slots, updates.indices] = updates.pages

    def open_branches(self, slots_B: np.ndarray, branches_B: np.ndarray, positions_B: np.ndarray) -> None:
        """Let rows behind the slots continue the slots' rows from a position on, beside them."""
        assert self._table is not None, NOT_ALLOCATED
        self._copy(self._table.open(slots_B, branches_B, positions_B))

    def adopt_branches(
        self, branches_B: np.ndarray, slots_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> None:
        """Let the slots' rows take over ``lengths`` tokens of branches, from position ``begins`` on."""
        assert self._table is not None, NOT_ALLOCATED
        self._copy(self._table.adopt(branches_B, slots_B, begins_B, lengths_B))

    def _copy(self, copies: TokenCopies) -> None:
        assert self._cache is not None, NOT_ALLOCATED
        self._cache.copy_tokens(
            torch.from_numpy(copies.sources_T).to(self.device),
            torch.from_numpy(copies.targets_T).to(self.device),
        )

    def forward(self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
        """Run the tokens, write their keys and values; logits [N, V] of the tokens at ``logits_index``."""
        assert self._cache is not None and self._table is not None, NOT_ALLOCATED
        plan = plan_attention(batch, self._table.pages, self._cache.page_size, self.device)
        return self._run(
            batch.token_ids_T, batch.positions_T, logits_index, PagedAttention(self._cache, plan)
        )

    @torch.inference_mode()
    def _run(
        self,
        token_ids_T: np.ndarray | Tensor,
        positions_T: np.ndarray,
        logits_index: Sequence[int] | np.ndarray,
        attention: LayerAttention,
    ) -> Tensor:
        # The output head needs at least one token; what it says of an unasked one is dropped.
        kept = torch.as_tensor(np.asarray(logits_index if len(logits_index) else [0], np.int64))
        with self._linears.active() if self._linears is not None else contextlib.nullcontext():
            output = self.model(
                input_ids=torch.as_tensor(token_ids_T, dtype=torch.int64, device=self.device)[None],
                position_ids=torch.as_tensor(positions_T, dtype=torch.int64, device=self.device)[None],
                use_cache=False,
                logits_to_keep=kept.to(self.device),
                paged_attention=attention,
            )
        return output.logits[0, : len(logits_index)]
