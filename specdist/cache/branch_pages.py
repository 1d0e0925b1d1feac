"""Branches of a row in one model's memory: shared full pages, and pages of their own after them.

A branch is one more row of the model's page table. It belongs to this model alone (the draft), so its own
pages lie after those that :class:`specdist.cache.pages.PageTable` hands out, always the same ones, and
nobody has to be told of it. Opening it points it at the pages of its row, up to the one in which it begins;
what stands before it in that page is copied. No tensors: what is to be copied is returned as places.

B branches, T tokens to copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdist.models.flat import arange_segments


@dataclass(frozen=True)
class TokenCopies:
    """Places of tokens in the memory, page × page_size + offset: the keys and values there are copied."""

    sources_T: np.ndarray
    targets_T: np.ndarray


class BranchPageTable:
    """A page table whose first rows are the slots and whose last rows are branches of them."""

    def __init__(
        self, *, num_slots: int, num_pages: int, page_size: int, max_seq_len: int, num_branch_rows: int,
        max_branch_tokens: int,
    ) -> None:  # fmt: skip
        """``num_pages`` are the slots'; a branch holds at most ``max_branch_tokens`` tokens of its own."""
        self._page_size = page_size
        self._num_slots = num_slots
        self._pages_per_branch = pages_per_branch(max_branch_tokens, page_size)
        own = num_pages + np.arange(num_branch_rows * self._pages_per_branch, dtype=np.int32)
        self._own_pages = own.reshape(num_branch_rows, self._pages_per_branch)
        width = -(-max_seq_len // page_size) + (self._pages_per_branch if num_branch_rows else 0)
        self.pages = np.zeros((num_slots + num_branch_rows, width), np.int32)

    def open(self, slots_B: np.ndarray, branches_B: np.ndarray, positions_B: np.ndarray) -> TokenCopies:
        """Branch off each slot's row before a position; returns what the branches' first pages lack."""
        first_B = positions_B // self._page_size
        self.pages[branches_B] = self.pages[slots_B]
        columns_BP = first_B[:, None] + np.arange(self._pages_per_branch)
        self.pages[branches_B[:, None], columns_BP] = self._own_pages[branches_B - self._num_slots]
        begins_B = first_B * self._page_size
        return self._copies(slots_B, branches_B, begins_B, positions_B - begins_B)

    def adopt(
        self, branches_B: np.ndarray, slots_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> TokenCopies:
        """Each slot's row takes over ``lengths`` tokens of a branch, from position ``begins`` on."""
        return self._copies(branches_B, slots_B, begins_B, lengths_B)

    def _copies(
        self, sources_B: np.ndarray, targets_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> TokenCopies:
        positions_T = np.repeat(begins_B, lengths_B) + arange_segments(lengths_B)
        pages_T, offsets_T = np.divmod(positions_T, self._page_size)
        sources_T, targets_T = (
            self.pages[np.repeat(rows_B, lengths_B), pages_T].astype(np.int64) * self._page_size + offsets_T
            for rows_B in (sources_B, targets_B)
        )
        return TokenCopies(sources_T, targets_T)


def pages_per_branch(max_branch_tokens: int, page_size: int) -> int:
    """Pages of its own that a branch needs wherever in a page it begins."""
    return -(-(page_size - 1 + max_branch_tokens) // page_size)
