"""Branches of a sequence in the draft's cache: shared full pages, followed by pages of their own.

A branch has one more slot in the draft's page table. The target does not know it, so its own pages are fixed
and lie after those that :class:`specdist.models.cache.pages.PageTable` hands out. Opening a branch points it
at the pages of its sequence, up to the page in which it begins; the tokens before it in that page are copied.
No tensors: the copies to make are returned as places.

B branches, T tokens to copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.windowed_pages import NULL_PAGE
from specdist.utils.ranges import arange_segments


@dataclass(frozen=True)
class TokenCopies:
    """Copies of keys and values between places in the cache: page × page_size + offset."""

    sources_T: np.ndarray
    targets_T: np.ndarray


class BranchPageTable:
    """A page table whose first slots are the sequences', and whose last ones are their branches'.

    ``windowed_pages``: the table of windowed layers, if they have pages of their own, as without branches
    they may.
    """

    def __init__(
        self, *, num_slots: int, num_pages: int, page_size: int, max_seq_len: int, num_branch_slots: int,
        max_branch_tokens: int, has_windowed: bool = False,
    ) -> None:  # fmt: skip
        """``num_pages``: of the slots; a branch has at most ``max_branch_tokens`` tokens of its own."""
        self._page_size = page_size
        self._num_slots = num_slots
        self._pages_per_branch = pages_per_branch(max_branch_tokens, page_size)
        own = num_pages + np.arange(num_branch_slots * self._pages_per_branch, dtype=np.int32)
        self._own_pages = own.reshape(num_branch_slots, self._pages_per_branch)
        width = -(-max_seq_len // page_size) + (self._pages_per_branch if num_branch_slots else 0)
        self.pages = np.zeros((num_slots + num_branch_slots, width), np.int32)
        # Passes without sequences, as those that are timed, may not write to the null page.
        self.windowed_pages = np.full_like(self.pages, NULL_PAGE + 1) if has_windowed else None
        assert not (has_windowed and num_branch_slots)
        self._rope_lengths = np.zeros(num_slots + num_branch_slots, np.int64)

    def update(self, updates: PageUpdates) -> None:
        """Apply updates of the table that this one follows."""
        if len(updates.slots):
            is_length = updates.indices < 0
            if is_length.any():
                self._rope_lengths[updates.slots[is_length]] = -1 - updates.indices[is_length]
                updates = updates.where(~is_length)
            if self.windowed_pages is not None:
                own = updates.where(updates.pages < 0)
                self.windowed_pages[own.slots, own.indices] = -1 - own.pages
                updates = updates.where(updates.pages >= 0)
            self.pages[updates.slots, updates.indices] = updates.pages

    def are_long(self, slots_T: np.ndarray, positions_T: np.ndarray, border: int) -> np.ndarray:
        """bool [T]: which tokens have the frequencies of a rope beyond its border."""
        return (self._rope_lengths[slots_T] > border) | (positions_T >= border)

    def open(self, slots_B: np.ndarray, branches_B: np.ndarray, positions_B: np.ndarray) -> TokenCopies:
        """Branch off each slot before a position; returns the copies that the branches' first pages need."""
        first_B = positions_B // self._page_size
        self.pages[branches_B] = self.pages[slots_B]
        self._rope_lengths[branches_B] = self._rope_lengths[slots_B]
        columns_BP = first_B[:, None] + np.arange(self._pages_per_branch)
        self.pages[branches_B[:, None], columns_BP] = self._own_pages[branches_B - self._num_slots]
        begins_B = first_B * self._page_size
        return self._copies(slots_B, branches_B, begins_B, positions_B - begins_B)

    def adopt(
        self, branches_B: np.ndarray, slots_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> TokenCopies:
        """Each slot takes over ``lengths`` tokens of a branch, from position ``begins`` on."""
        return self._copies(branches_B, slots_B, begins_B, lengths_B)

    def _copies(
        self, sources_B: np.ndarray, targets_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> TokenCopies:
        positions_T = np.repeat(begins_B, lengths_B) + arange_segments(lengths_B)
        pages_T, offsets_T = np.divmod(positions_T, self._page_size)
        sources_T, targets_T = (
            self.pages[np.repeat(slots_B, lengths_B), pages_T].astype(np.int64) * self._page_size + offsets_T
            for slots_B in (sources_B, targets_B)
        )
        return TokenCopies(sources_T, targets_T)


def pages_per_branch(max_branch_tokens: int, page_size: int) -> int:
    """A branch's own pages, enough wherever in a page it begins."""
    return -(-(page_size - 1 + max_branch_tokens) // page_size)
