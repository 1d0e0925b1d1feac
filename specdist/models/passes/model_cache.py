"""What a model keeps of its sequences: keys and values in pages, the pages' tables, and recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specdist.models.cache.key_value import BranchPageTable, KeyValueCache, TokenCopies, pages_per_branch
from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.prefix_states import NO_ROLLBACK, Rollback
from specdist.models.cache.windowed_pages import WindowedLayers
from specdist.models.families.dry_run import LayerShapes
from specdist.models.recurrent.states import RecurrentStates
from specdist.sampling.uploads import upload

# Where padding of passes of fixed shapes is written.
NUM_SCRATCH_PAGES = 1


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """How much is kept: the slots' pages, and those of the branches after them.

    Attributes:
        windowed: layers that have pages of their own.
        rollback: of recurrent layers' states: of all slots, and of ``num_prefix_states`` prefixes.
    """

    num_pages: int
    page_size: int
    num_slots: int
    max_seq_len: int
    num_branch_slots: int = 0
    max_branch_tokens: int = 0
    windowed: WindowedLayers | None = None
    rollback: Rollback = NO_ROLLBACK
    num_prefix_states: int = 0


class ModelCache:
    """The memory of one model's sequences.

    The page table is a copy of :class:`specdist.models.cache.pages.PageTable`, which sends updates.

    Attributes:
        states: of recurrent layers; None if the model has none.
        is_recorded: passes of fixed shapes may use it; their padding is written to ``scratch_page`` of each
            layer, and to ``windowed_scratch_page`` of windowed layers that have pages of their own.
    """

    def __init__(
        self,
        shapes: LayerShapes,
        sizes: CacheSizes,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_float8: bool,
        may_be_recorded: bool,
    ) -> None:
        self._device, windowed = device, sizes.windowed
        self.states: RecurrentStates | None = None
        if shapes.states:
            self.states = RecurrentStates(
                shapes.states,
                num_slots=sizes.num_slots + sizes.num_branch_slots,
                num_kept=sizes.num_prefix_states,
                rollback=sizes.rollback,
                dtype=dtype,
                device=device,
            )
        self.is_recorded = may_be_recorded and (self.states is None or self.states.can_be_recorded)
        num_scratch = NUM_SCRATCH_PAGES if self.is_recorded else 0
        branch_pages = pages_per_branch(sizes.max_branch_tokens, sizes.page_size)
        self.scratch_page = sizes.num_pages + sizes.num_branch_slots * branch_pages
        self.windowed_scratch_page = None if windowed is None else windowed.num_pages
        self.key_value = KeyValueCache(
            shapes.shapes,
            num_pages=self.scratch_page + num_scratch,
            page_size=sizes.page_size,
            dtype=dtype,
            device=device,
            windowed=frozenset() if windowed is None else windowed.of(shapes.windows),
            num_windowed_pages=(self.windowed_scratch_page or 0) + num_scratch,
            is_float8=is_float8,
        )
        self.table = BranchPageTable(
            num_slots=sizes.num_slots,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            max_seq_len=sizes.max_seq_len,
            num_branch_slots=sizes.num_branch_slots,
            max_branch_tokens=sizes.max_branch_tokens,
            has_windowed=windowed is not None,
        )

    def update_pages(self, updates: PageUpdates) -> None:
        if self.states is not None:
            updates = self.states.update(updates)
        self.table.update(updates)

    def open_branches(self, slots_B: np.ndarray, branches_B: np.ndarray, positions_B: np.ndarray) -> None:
        """Branch off each slot before a position, into a slot of its own after those of the sequences."""
        self._copy(self.table.open(slots_B, branches_B, positions_B))
        if self.states is not None:
            self.states.copy(slots_B, branches_B)

    def adopt_branches(
        self, branches_B: np.ndarray, slots_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> None:
        """Let each slot take over ``lengths`` tokens of a branch, from position ``begins`` on."""
        self._copy(self.table.adopt(branches_B, slots_B, begins_B, lengths_B))
        if self.states is not None:
            self.states.copy(branches_B, slots_B)

    def _copy(self, copies: TokenCopies) -> None:
        self.key_value.copy_tokens(*upload(self._device, *copies))
