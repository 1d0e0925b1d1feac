"""The pages of layers that see a window of the last tokens: of each sequence, those that it will still see.

In some models most layers have such a window (five of six in Gemma 3, half of gpt-oss). They are a group of
their own: with a pool of pages, and with a table of pages in which a column stands for the same positions as
in the table of all other layers. Several windows of a model count as the longest.

A page of the other layers (here: a *page*) has a windowed page beside it from when a pass that writes to it
is planned until no sequence that holds it will see it again. What is committed is never rolled back, so this
follows from committed lengths. Columns before the window then stand for :data:`NULL_PAGE`, which nobody
writes: kernels that read a little before a window, and mask it, read zeros there, and not what another
sequence has written since, which may not be finite.

Prefixes are shared as they are in the other layers. The windowed page of a page that new sequences may find
stays until its memory is needed, the one that was last seen the longest time ago first. A prefix is found
only as far as the window before its end is there.

No tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

NULL_PAGE = 0


@dataclass(frozen=True)
class WindowedLayers:
    """The layers with a window of at most ``window`` tokens, and the number of pages of their own, the null
    page among them."""

    window: int
    num_pages: int

    def of(self, windows: Mapping[int, int | None]) -> frozenset[int]:
        """The windowed ones of a model's layers."""
        return frozenset(layer for layer, own in windows.items() if own is not None and own <= self.window)


def longest_window(windows: Iterable[int | None], max_seq_len: int) -> int | None:
    """The longest window of a model's layers that hides anything from a sequence of this length; None if none
    does."""
    return max((window for window in windows if window is not None and window < max_seq_len), default=None)


def num_pool_pages(
    window: int, *, page_size: int, num_slots: int, num_reach_tokens: int, num_batched_tokens: int,
    max_seq_len: int,
) -> int:  # fmt: skip
    """Enough for every slot, whatever the others hold; ``num_reach_tokens``: from the first that is not
    committed on, that a round may write to.

    Each slot may have a partly used page at either end. The tokens of a batch count twice: a prompt's last
    chunk is given back when its sequence decodes. In most rounds they are fewer, and prefixes have the room.
    """
    held = -(-(window + num_reach_tokens) // page_size) + 1
    longest = -(-max_seq_len // page_size)
    return 1 + num_slots * (min(held, longest) + 1) + 2 * -(-num_batched_tokens // page_size)


class WindowedPages:
    """Which pages have windowed pages, and which of them each slot sees: a range of columns.

    ``on_change(slot, column, windowed page)`` is called for the models' copies of the table.
    """

    def __init__(
        self,
        layers: WindowedLayers,
        *,
        page_size: int,
        num_slots: int,
        findable: Container[int],
        on_change: Callable[[int, int, int], None],
    ) -> None:
        """``findable``: at any time, the pages that new sequences may find."""
        self._window, self._page_size = layers.window, page_size
        self._findable, self._on_change = findable, on_change
        self._free = [page for page in range(layers.num_pages - 1, -1, -1) if page != NULL_PAGE]
        self._beside: dict[int, int] = {}
        # The slots that see a page; and pages that none does, but new sequences may.
        self._num_seeing: Counter[int] = Counter()
        self._unseen: OrderedDict[int, None] = OrderedDict()
        self._firsts, self._ends = [0] * num_slots, [0] * num_slots

    def __contains__(self, page: int) -> bool:
        """Whether it has a windowed page."""
        return page in self._beside

    def num_usable(self, pages: list[int]) -> int:
        """The longest prefix of these, a context's first pages, before which all is there that its next token
        sees."""
        usable = num_there = 0
        for count, page in enumerate(pages, start=1):
            num_there = num_there + 1 if page in self._beside else 0
            if num_there >= count - self._first_seen(count * self._page_size):
                usable = count
        return usable

    def open(self, slot: int, pages: list[int]) -> None:
        """A new sequence shares these pages."""
        self._firsts[slot], self._ends[slot] = self._first_seen(len(pages) * self._page_size), len(pages)
        for column in range(self._firsts[slot]):
            self._on_change(slot, column, NULL_PAGE)
        for column in range(self._firsts[slot], len(pages)):
            self._see(slot, column, pages[column])

    def slide(self, slot: int, pages: list[int], begin: int, end: int) -> None:
        """The next tokens of the sequence with these pages are ``begin .. end - 1``, and none before them
        will be run again."""
        first = min(self._first_seen(begin), self._ends[slot])
        for column in range(self._firsts[slot], first):
            self._leave(pages[column])
            self._on_change(slot, column, NULL_PAGE)
        self._firsts[slot] = first
        last = -(-end // self._page_size)
        for column in range(self._ends[slot], last):
            self._beside[pages[column]] = self._new_page()
            self._see(slot, column, pages[column])
        self._ends[slot] = max(last, self._ends[slot])

    def close(self, slot: int, pages: list[int]) -> None:
        """The sequence with these pages has ended. As with other pages, what is shared less often is evicted
        first."""
        for column in range(self._ends[slot] - 1, self._firsts[slot] - 1, -1):
            self._leave(pages[column])
        self._firsts[slot] = self._ends[slot] = 0

    def forget(self, page: int) -> None:
        """No sequence holds or finds the page any more."""
        if page in self._unseen:
            del self._unseen[page]
            self._free.append(self._beside.pop(page))

    def _first_seen(self, position: int) -> int:
        """The column of the first key that a token there sees."""
        return max(0, position - self._window + 1) // self._page_size

    def _see(self, slot: int, column: int, page: int) -> None:
        self._unseen.pop(page, None)
        self._num_seeing[page] += 1
        self._on_change(slot, column, self._beside[page])

    def _leave(self, page: int) -> None:
        self._num_seeing[page] -= 1
        if self._num_seeing[page]:
            return
        del self._num_seeing[page]
        self._unseen[page] = None
        if page not in self._findable:
            self.forget(page)

    def _new_page(self) -> int:
        if not self._free:
            assert self._unseen, "there are fewer windowed pages than num_pool_pages says"
            self.forget(next(iter(self._unseen)))
        return self._free.pop()
