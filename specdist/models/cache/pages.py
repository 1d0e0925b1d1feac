"""The page table of the key/value cache: allocation, sharing of prefixes, eviction. No tensors.

A page holds the keys and values of ``page_size`` consecutive positions of one sequence, for every layer. One
table serves target and draft: a page number stands for the same tokens in both models' caches. Layers of the
target that see a window may have pages beside them: :mod:`specdist.models.cache.windowed_pages`. Prefixes of
a target with recurrent layers end at a state: :mod:`specdist.models.cache.prefix_states`.

Full pages of prompts are shared. A page is identified by all tokens from the sequence's beginning to the
page's end, so sequences with a common prefix use the same pages, and a finished sequence's prompt pages stay
usable until their memory is needed. Rolling back after a rejection only means remembering a shorter length:
later writes overwrite.

What a rope makes of a position may depend on the length of the text (longrope). Then pages are shared by
sequences on the same side of every border, and the models' copies of the table are told each sequence's
length.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from specdist.models.cache.prefix_states import PrefixStates
from specdist.models.cache.windowed_pages import WindowedLayers, WindowedPages

DIGEST_BYTES = 16  # two different contexts share a digest with odds of 1 in 2**64 after 2**32 pages


@dataclass(frozen=True)
class PageUpdates:
    """Changed entries of the page table, ``table[slots[i], indices[i]] = pages[i]``; int32, equal lengths.

    A negative index is not an entry: ``-1 - index`` is the length of the slot's text, as its rope has it. Nor
    is a negative page: ``-1 - page`` is that of windowed layers. A negative slot's entry copies a state of
    recurrent layers: before the pass the kept one of number ``page`` to the slot ``-1 - slot``, or, if
    ``index`` is not 0, after the pass that slot's, of ``index`` tokens, to that number.
    """

    slots: np.ndarray
    indices: np.ndarray
    pages: np.ndarray

    @staticmethod
    def from_entries(entries: list[tuple[int, int, int]]) -> PageUpdates:
        if not entries:
            return NO_UPDATES
        columns = np.array(entries, dtype=np.int32).reshape(-1, 3).T
        return PageUpdates(*columns.copy())

    def without(self, slots: np.ndarray) -> PageUpdates:
        """The updates of other slots."""
        return self.where(np.isin(self.slots, slots, invert=True))

    def where(self, is_kept: np.ndarray) -> PageUpdates:
        return PageUpdates(self.slots[is_kept], self.indices[is_kept], self.pages[is_kept])

    @staticmethod
    def joined(parts: list[PageUpdates]) -> PageUpdates:
        """These updates, one after the other."""
        filled = [part for part in parts if len(part.slots)]
        if len(filled) < 2:
            return filled[0] if filled else NO_UPDATES
        return PageUpdates(
            np.concatenate([part.slots for part in filled]),
            np.concatenate([part.indices for part in filled]),
            np.concatenate([part.pages for part in filled]),
        )


NO_UPDATES = PageUpdates(*np.zeros((3, 0), np.int32))


@dataclass
class _SlotPages:
    pages: list[int] = field(default_factory=list)
    # Keys of the full context pages, in order; the first `num_published` can be found by other sequences.
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0


class PageTable:
    """Allocates pages to sequences, each named by its slot, ``0 .. num_slots - 1``.

    Attributes:
        windowed: of layers with pages of their own, if there are any.
        states: kept ones of recurrent layers, up to which prefixes are shared; None without such layers.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        rope_borders: tuple[int, ...] = (),
        windowed: WindowedLayers | None = None,
        num_prefix_states: int = 0,
    ) -> None:
        """``rope_borders``: lengths beyond which a model's rope has other frequencies. ``windowed``: layers
        that have pages of their own. ``num_prefix_states``: of a target with recurrent layers."""
        self._rope_borders = rope_borders
        self.num_pages = num_pages
        self.page_size = page_size
        self._slots: list[_SlotPages | None] = [None] * num_slots
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}
        # Pages that no sequence holds but a new one may still find; the oldest is evicted first.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._changes: list[tuple[int, int, int]] = []
        self.states = PrefixStates(num_prefix_states) if num_prefix_states else None
        assert not (num_prefix_states and windowed)
        self.windowed: WindowedPages | None = None
        if windowed is not None:
            self.windowed = WindowedPages(
                windowed,
                page_size=page_size,
                num_slots=num_slots,
                findable=self._key_of_page,
                on_change=lambda slot, column, page: self._changes.append((slot, column, -1 - page)),
            )

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now: free or evictable."""
        return len(self._free) + len(self._evictable)

    def num_pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def open(self, slot: int, context_ids: list[int], *, is_shared: bool = True, rope_length: int = 0) -> int:
        """Give ``slot`` to a new sequence and return how many leading tokens of its context are in shared
        pages.

        At least the last token of the context is never shared, so that it is computed; none is where
        sharing is not wanted (``is_shared``). ``rope_length``: of the text, as its rope has it.
        """
        assert self._slots[slot] is None, f"slot {slot} is in use"
        own = self._slots[slot] = _SlotPages(keys=self._page_keys(context_ids, rope_length))
        if self._rope_borders:
            self._changes.append((slot, -1 - rope_length, 0))
        found: list[int] = []
        keys = own.keys[: (len(context_ids) - 1) // self.page_size] if is_shared else []
        for key in keys:
            page = self._page_of_key.get(key)
            if page is None:
                break
            found.append(page)
        if self.windowed is not None:
            found = found[: self.windowed.num_usable(found)]
        elif self.states is not None:
            found = found[: self.states.open(slot, keys, len(found))]
        if self.windowed is not None:
            self.windowed.open(slot, found)
        for page in found:
            self._take(page)
            self._assign(slot, page)
        own.num_published = len(own.pages)
        return len(own.pages) * self.page_size

    def chunk_end(self, slot: int, end: int) -> int:
        """Where a chunk that may reach ``end`` ends: where the slot's next state is to be kept, if before."""
        num_pages = 0 if self.states is None else self.states.next_end(slot)
        return min(end, num_pages * self.page_size) if num_pages else end

    def extend(self, slot: int, length: int) -> bool:
        """Allocate pages for positions ``0 .. length - 1``. False, and no change, if there are too few."""
        missing = self.num_pages_for(length) - len(self._pages_of(slot).pages)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            self._assign(slot, self._new_page())
        return True

    def slide(self, slot: int, begin: int, end: int) -> None:
        """The next tokens of the slot are ``begin .. end - 1``, for which it has pages, and none before them
        will be run again: windowed layers get pages for them, and give back what they do not see."""
        if self.windowed is not None:
            self.windowed.slide(slot, self._pages_of(slot).pages, begin, end)

    def publish(self, slot: int, length: int) -> None:
        """Let other sequences share the context pages within this one's first ``length`` tokens.

        To be called when the pass that writes them is planned: a pass writes before it reads, so even a
        sequence of the same pass may use them.
        """
        own = self._pages_of(slot)
        for index in range(own.num_published, min(length // self.page_size, len(own.keys))):
            key, page = own.keys[index], own.pages[index]
            if self.windowed is not None and page in self.windowed:
                self._replace(key)
            if key not in self._page_of_key:
                self._page_of_key[key] = page
                self._key_of_page[page] = key
            own.num_published = index + 1
        if self.states is not None and 0 < self.states.next_end(slot) * self.page_size == length:
            self.states.keep(slot, length)

    def close(self, slot: int) -> None:
        """Release the pages of a sequence that is finished or preempted."""
        if self.windowed is not None:
            self.windowed.close(slot, self._pages_of(slot).pages)
        if self.states is not None:
            self.states.close(slot)
        # The end of a prompt is shared less often than its beginning, so it is evicted first.
        for page in reversed(self._pages_of(slot).pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of_page:
                    self._evictable[page] = None
                else:
                    self._free.append(page)
        self._slots[slot] = None

    def drain_updates(self) -> PageUpdates:
        """Changes of the page table since the last call, for the models' copies of it."""
        changes, self._changes = self._changes, []
        if self.states is not None:
            changes += [(-1 - slot, index, number) for slot, index, number in self.states.drain()]
        return PageUpdates.from_entries(changes)

    def _pages_of(self, slot: int) -> _SlotPages:
        own = self._slots[slot]
        assert own is not None, f"slot {slot} is empty"
        return own

    def _page_keys(self, token_ids: list[int], rope_length: int) -> list[bytes]:
        """One key per full page: a digest of all tokens from the beginning to the page's end, and of the
        borders that the text is beyond."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        keys, key = [], bytes(rope_length > border for border in self._rope_borders)
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page_bytes = tokens[end - self.page_size : end].tobytes()
            key = hashlib.blake2b(key + page_bytes, digest_size=DIGEST_BYTES).digest()
            keys.append(key)
        return keys

    def _assign(self, slot: int, page: int) -> None:
        own = self._pages_of(slot)
        self._changes.append((slot, len(own.pages), page))
        own.pages.append(page)

    def _replace(self, key: bytes) -> None:
        """If the page that is found by this key has lost its windowed page, find another from now on."""
        assert self.windowed is not None
        page = self._page_of_key.get(key)
        if page is not None and page not in self.windowed:
            del self._page_of_key[key], self._key_of_page[page]
            if page in self._evictable:
                del self._evictable[page]
                self._free.append(page)

    def _take(self, page: int) -> None:
        self._evictable.pop(page, None)
        self._references[page] += 1

    def _new_page(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._evictable.popitem(last=False)
            key = self._key_of_page.pop(page)
            del self._page_of_key[key]
            if self.windowed is not None:
                self.windowed.forget(page)
            if self.states is not None:
                self.states.forget(key)
        self._references[page] = 1
        return page
