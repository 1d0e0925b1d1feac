"""The draft's cache as a window: each sequence's first page and its last tokens, in pages of the draft's own.

A token sees the keys of the sequence's first page (attention sinks: Xiao et al. 2024, arXiv:2309.17453), of
its own page, and of so many pages before that one. Of a prompt only what its end sees is run. Both follow
from the prompt's length and the token's position alone, whatever the batch, its chunks, and preemptions: so
what the draft says of a token does not depend on them either. Positions stay the true ones.

Pages are taken when a pass writes to them, and given back as a whole once no token can see them. There are
enough for every slot, whatever the others hold.

Attention reads a sequence's visible keys as if there were no others: in a table of the visible pages alone,
at places counted in them (:meth:`WindowPageTable.visible`). So every kernel can do it.

S segments (consecutive tokens of a slot that see the same pages), T tokens, P pages, B branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdist.models.cache.branch_pages import BranchPageTable, TokenCopies
from specdist.models.cache.pages import PageUpdates

# First pages of a sequence that are always seen.
NUM_SINK_PAGES = 1


@dataclass(frozen=True)
class DraftWindow:
    """A window of ``num_pages`` pages of ``page_size`` tokens before that of the token itself."""

    num_pages: int
    page_size: int

    @staticmethod
    def of_tokens(num_tokens: int, page_size: int) -> DraftWindow:
        """At least so many tokens, in whole pages."""
        return DraftWindow(-(-num_tokens // page_size), page_size)

    @property
    def num_visible_pages(self) -> int:
        """The most that a token sees."""
        return NUM_SINK_PAGES + self.num_pages + 1

    def first_page(self, position: int) -> int:
        """The first page after the sinks that a token sees whose sequence has no beginning of its own."""
        return max(NUM_SINK_PAGES, position // self.page_size - self.num_pages)

    def is_run(self, positions_T: np.ndarray, num_prompt_tokens: int) -> np.ndarray:
        """bool [T]: which tokens of a sequence, prompt and completion, the draft runs at all."""
        pages_T = positions_T // self.page_size
        return (pages_T < NUM_SINK_PAGES) | (pages_T >= self.first_page(num_prompt_tokens - 1))

    def pages_per_slot(self, num_reach_tokens: int, max_seq_len: int) -> int:
        """Held by a sequence between two rounds, where so many positions from the first one that may be run
        again are written to."""
        num_written = -(-(self.page_size - 1 + num_reach_tokens) // self.page_size)
        return min(NUM_SINK_PAGES + self.num_pages + num_written, -(-max_seq_len // self.page_size))

    def num_pool_pages(
        self, *, num_slots: int, num_reach_tokens: int, num_batched_tokens: int, max_seq_len: int
    ) -> int:
        """Enough for so many slots and for a pass of ``num_batched_tokens`` more."""
        # Of a pass each slot may have a page that is begun only.
        num_passing = -(-num_batched_tokens // self.page_size) + num_slots
        return num_slots * self.pages_per_slot(num_reach_tokens, max_seq_len) + num_passing


@dataclass(frozen=True)
class VisiblePages:
    """What tokens see.

    Attributes:
        segments_T: number of the token's segment, whose tokens all see the same pages.
        places_T: the token's place in its segment's pages: the keys at and before it are those that it sees.
        pages_SP: those pages.
    """

    segments_T: np.ndarray
    places_T: np.ndarray
    pages_SP: np.ndarray


class WindowPageTable(BranchPageTable):
    """The table of a draft with a window; it follows no other table.

    Slots hold their first pages, and those from ``first`` to ``end``. A sequence is run from ``begin`` on, of
    which only its prompt's tokens need to know: later ones, and branches, do not see so far.
    """

    is_window = True

    def __init__(
        self, window: DraftWindow, *, num_slots: int, num_pages: int, page_size: int, max_seq_len: int,
        num_branch_slots: int, max_branch_tokens: int,
    ) -> None:  # fmt: skip
        """``num_pages``: as of :meth:`DraftWindow.num_pool_pages`."""
        super().__init__(
            num_slots=num_slots, num_pages=num_pages, page_size=page_size, max_seq_len=max_seq_len,
            num_branch_slots=num_branch_slots, max_branch_tokens=max_branch_tokens,
        )  # fmt: skip
        self._window = window
        self._free = list(range(num_pages - 1, -1, -1))
        self._begins, self._firsts, self._ends = np.zeros((3, len(self.pages)), np.int64)
        self._num_sinks = np.zeros(num_slots, np.int64)

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def visible_width(self) -> int:
        return min(super().visible_width, self._window.num_visible_pages)

    def most_segments(self, num_tokens: int) -> int:
        # Each slot's tokens may begin and end within a page.
        return 2 * len(self.pages) + num_tokens // self._page_size

    def update(self, updates: PageUpdates) -> None:
        """The target's pages are not the draft's."""
        self._without_rope_lengths(updates)

    def begin(self, slots: np.ndarray) -> None:
        """New sequences: give back what the slots hold."""
        for slot in slots.tolist():
            self._give_back(slot, self._firsts[slot], self._ends[slot])
            self._give_back(slot, 0, self._num_sinks[slot])
            self._num_sinks[slot] = self._begins[slot] = self._firsts[slot] = self._ends[slot] = 0

    def keep_from(self, slots_S: np.ndarray, positions_S: np.ndarray) -> None:
        """Give back pages that no token from these positions on can see."""
        visible_S = np.maximum(positions_S // self._page_size - self._window.num_pages, self._begins[slots_S])
        visible_S = np.minimum(visible_S, self._ends[slots_S])
        for index in np.flatnonzero(visible_S > self._firsts[slots_S]).tolist():
            slot = int(slots_S[index])
            self._give_back(slot, self._firsts[slot], visible_S[index])
            self._firsts[slot] = visible_S[index]

    def reserve(self, slots_S: np.ndarray, begins_S: np.ndarray, ends_S: np.ndarray) -> None:
        """Take pages for positions ``begins .. ends - 1`` of each slot."""
        firsts_S, ends_S = begins_S // self._page_size, -(-ends_S // self._page_size)
        # Branches have pages of their own.
        own = slots_S < self._num_slots
        slots_S, firsts_S, ends_S = slots_S[own], firsts_S[own], ends_S[own]
        is_short_S = ends_S > np.maximum(self._ends[slots_S], NUM_SINK_PAGES)
        is_short_S |= np.minimum(ends_S, NUM_SINK_PAGES) > self._num_sinks[slots_S]
        is_short_S |= (firsts_S < self._firsts[slots_S]) & (firsts_S >= NUM_SINK_PAGES)
        for index in np.flatnonzero(is_short_S).tolist():
            self._take(int(slots_S[index]), int(firsts_S[index]), int(ends_S[index]))

    def visible(self, slots_T: np.ndarray, positions_T: np.ndarray) -> VisiblePages:
        """What each token sees, whose place must have been reserved."""
        pages_T = positions_T // self._page_size
        firsts_T = np.maximum(pages_T - self._window.num_pages, self._begins[slots_T])
        hidden_T = np.where(pages_T < NUM_SINK_PAGES, 0, np.maximum(firsts_T - NUM_SINK_PAGES, 0))
        is_first_T = np.ones(len(slots_T), bool)
        is_first_T[1:] = (slots_T[1:] != slots_T[:-1]) | (hidden_T[1:] != hidden_T[:-1])
        starts_S = np.flatnonzero(is_first_T)
        columns_P = np.arange(self.visible_width)
        hidden_SP = np.where(columns_P < NUM_SINK_PAGES, 0, hidden_T[starts_S][:, None])
        # Beyond the last position there is nothing to see.
        columns_SP = np.minimum(columns_P + hidden_SP, self.pages.shape[1] - 1)
        return VisiblePages(
            segments_T=np.cumsum(is_first_T) - 1,
            places_T=positions_T - hidden_T * self._page_size,
            pages_SP=self.pages[slots_T[starts_S][:, None], columns_SP],
        )

    def adopt(
        self, branches_B: np.ndarray, slots_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> TokenCopies:
        self.reserve(slots_B, begins_B, begins_B + lengths_B)
        return super().adopt(branches_B, slots_B, begins_B, lengths_B)

    def _take(self, slot: int, first: int, end: int) -> None:
        for page in range(self._num_sinks[slot], min(end, NUM_SINK_PAGES)):
            self.pages[slot, page] = self._free.pop()
            self._num_sinks[slot] = page + 1
        if end <= NUM_SINK_PAGES:
            return
        first = max(first, NUM_SINK_PAGES)
        if not self._firsts[slot] <= first <= self._ends[slot] or not self._ends[slot]:
            # The first tokens after the sinks; of a measurement, any.
            self._give_back(slot, self._firsts[slot], self._ends[slot])
            self._begins[slot] = self._firsts[slot] = self._ends[slot] = first
        for page in range(self._ends[slot], end):
            self.pages[slot, page] = self._free.pop()
        self._ends[slot] = max(end, self._ends[slot])

    def _give_back(self, slot: int, first: int, end: int) -> None:
        self._free += self.pages[slot, first:end].tolist()


def page_table(window: DraftWindow | None, has_windowed: bool = False, **sizes: int) -> BranchPageTable:
    """``sizes``: as of :class:`BranchPageTable`."""
    if window is None:
        return BranchPageTable(**sizes, has_windowed=has_windowed)
    assert not has_windowed
    return WindowPageTable(window, **sizes)
