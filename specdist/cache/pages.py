"""Who owns which page of the key/value cache: lengths, page tables, sharing, eviction. No tensors.

A page holds the keys and values of ``page_size`` consecutive positions of one row, for every layer. One table
serves the target and the draft: the same page number is that stretch of tokens in both models' memory.

Full pages of prompts are shared. A page is known by the chain of tokens from the row's beginning to its
end, so rows with a common beginning point to the same pages, and a finished row's prompt pages stay usable
until their memory is needed. Rolling back after a rejection is remembering a shorter length: later writes
overwrite.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

DIGEST_BYTES = 16  # two different contexts share a digest with odds of 1 in 2**64 after 2**32 pages


@dataclass(frozen=True)
class PageUpdates:
    """Changed entries of the page table, ``table[slots[i], indices[i]] = pages[i]``; int32, equal lengths."""

    slots: np.ndarray
    indices: np.ndarray
    pages: np.ndarray

    @staticmethod
    def from_entries(entries: list[tuple[int, int, int]]) -> PageUpdates:
        columns = np.array(entries, dtype=np.int32).reshape(-1, 3).T
        return PageUpdates(*columns.copy())


@dataclass
class _Row:
    pages: list[int] = field(default_factory=list)
    # Keys of the row's full context pages, in order; the first `num_published` can be found by other rows.
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0


class PageTable:
    """Allocates pages to rows. A row is named by its slot, ``0 .. num_slots - 1``."""

    def __init__(self, *, num_pages: int, page_size: int, num_slots: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._rows: list[_Row | None] = [None] * num_slots
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}
        # Pages that no row holds but whose contents a new row may still find; the oldest is evicted first.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._changes: list[tuple[int, int, int]] = []

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now: never used, released, or evictable."""
        return len(self._free) + len(self._evictable)

    def num_pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def open(self, slot: int, context_ids: list[int]) -> int:
        """Give ``slot`` to a new row and return how many leading tokens of its context are in shared pages.

        At least the last token of the context is left for the row to compute.
        """
        assert self._rows[slot] is None, f"slot {slot} is in use"
        row = self._rows[slot] = _Row(keys=self._chain_keys(context_ids))
        for key in row.keys[: (len(context_ids) - 1) // self.page_size]:
            page = self._page_of_key.get(key)
            if page is None:
                break
            self._take(page)
            self._assign(slot, page)
        row.num_published = len(row.pages)
        return len(row.pages) * self.page_size

    def extend(self, slot: int, length: int) -> bool:
        """Make room for positions ``0 .. length - 1`` of the row. False, and no change, if pages run out."""
        missing = self.num_pages_for(length) - len(self._row(slot).pages)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            self._assign(slot, self._new_page())
        return True

    def publish(self, slot: int, length: int) -> None:
        """Let other rows share this row's context pages that lie within its first ``length`` tokens.

        To be called when the pass that writes them is planned: a pass writes before it reads, so even a row
        of the same pass may use them.
        """
        row = self._row(slot)
        for index in range(row.num_published, min(length // self.page_size, len(row.keys))):
            key, page = row.keys[index], row.pages[index]
            if key not in self._page_of_key:
                self._page_of_key[key] = page
                self._key_of_page[page] = key
            row.num_published = index + 1

    def close(self, slot: int) -> None:
        """The row is finished, or will start over: its pages are released."""
        # The end of a prompt is of less use to others than its beginning, so it is evicted first.
        for page in reversed(self._row(slot).pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of_page:
                    self._evictable[page] = None
                else:
                    self._free.append(page)
        self._rows[slot] = None

    def forget_contents(self) -> None:
        """The passes that were to write the shared pages have not run: no new row may find them."""
        self._page_of_key.clear()
        self._key_of_page.clear()
        self._free += self._evictable
        self._evictable.clear()

    def drain_updates(self) -> PageUpdates:
        """What changed in the page table since the last call, for the copies of it beside the models."""
        changes, self._changes = self._changes, []
        return PageUpdates.from_entries(changes)

    def _row(self, slot: int) -> _Row:
        row = self._rows[slot]
        assert row is not None, f"slot {slot} is empty"
        return row

    def _chain_keys(self, token_ids: list[int]) -> list[bytes]:
        """One key per full page: a digest of all tokens from the row's beginning to the page's end."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        keys, key = [], b""
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page_bytes = tokens[end - self.page_size : end].tobytes()
            key = hashlib.blake2b(key + page_bytes, digest_size=DIGEST_BYTES).digest()
            keys.append(key)
        return keys

    def _assign(self, slot: int, page: int) -> None:
        row = self._row(slot)
        self._changes.append((slot, len(row.pages), page))
        row.pages.append(page)

    def _take(self, page: int) -> None:
        self._evictable.pop(page, None)
        self._references[page] += 1

    def _new_page(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._evictable.popitem(last=False)
            del self._page_of_key[self._key_of_page.pop(page)]
        self._references[page] = 1
        return page
