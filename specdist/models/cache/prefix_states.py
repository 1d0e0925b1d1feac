"""Which states of recurrent layers are kept at the ends of prefixes, for other sequences to begin with.

Keys and values of a prefix are in its pages; a state is of a sequence's end alone. So a sequence of a model
with recurrent layers can share a prefix only up to where a state has been kept: a copy of a slot, as large as
one (75 MB in Qwen3-Next), taken when a chunk of a prompt has ended there. As in Marconi (Pan et al. 2024,
arXiv 2411.19379), one is kept only where prompts are known to part: at the end of the last full page that a
prompt has in common with the pages that are found for it, and with the request that follows it, as samples
of a row do. So a prompt that nothing is shared with is neither copied nor cut, and a prefix is run once if
its sequences follow each other, else twice.

A sequence whose prefix is about to get a state waits for it. States beyond the number that there is room for
replace the one that was used the longest time ago; those whose pages are evicted go with them.

No tensors: copies are told by the page table's updates.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

# A copy's entry among the updates: its slot and number, and after how many tokens, 0 where it is begun with.
Copy = tuple[int, int, int]


@dataclass
class _Prefix:
    """A running sequence's prefix: keys of the full pages that it may share, how many of them it does share,
    and after how many its state is to be kept."""

    keys: list[bytes]
    num_shared: int
    ends: list[int] = field(default_factory=list)


class PrefixStates:
    """Owns ``num_states`` places of states, each found by the key of the last page before it."""

    def __init__(self, num_states: int) -> None:
        self._free = list(range(num_states - 1, -1, -1))
        self._num_states = num_states
        # The one used the longest time ago is the first. While a pass is planned, new ones are not there yet.
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._new: dict[bytes, int] = {}
        self._prefixes: dict[int, _Prefix] = {}
        self._begun: dict[int, int] = {}
        self._copies: list[Copy] = []

    def open(self, slot: int, keys: list[bytes], num_found: int) -> int:
        """A sequence begins, and its first ``num_found`` pages are there. Returns how many it shares: those
        up to a state."""
        num_shared = next((n for n in range(num_found, 0, -1) if keys[n - 1] in self._kept), 0)
        self._prefixes[slot] = _Prefix(keys, num_shared, [num_found] if num_found > num_shared else [])
        if num_shared:
            self._kept.move_to_end(keys[num_shared - 1])
            self._begun[slot] = self._kept[keys[num_shared - 1]]
        return num_shared

    def may_begin(self, slot: int, num_common: int) -> bool:
        """Whether the sequence is not to wait for states that others are about to leave. ``num_common``: full
        pages that it has in common with the request after it."""
        own = self._prefixes[slot]
        others = [each for each in self._prefixes.values() if each is not own]
        coming = {each.keys[end - 1] for each in others for end in each.ends} | self._new.keys()
        if not coming.isdisjoint(own.keys[own.num_shared :]):
            return False
        num_common = min(num_common, len(own.keys))
        if num_common > own.num_shared:
            own.ends = sorted({*own.ends, num_common})
        own.ends = own.ends[-self._num_states :]
        return True

    @property
    def has_room(self) -> bool:
        """Whether there is room for all states that are about to be kept."""
        return len(self._new) + sum(len(each.ends) for each in self._prefixes.values()) <= self._num_states

    def next_end(self, slot: int) -> int:
        """The number of pages after which the slot's next state is to be kept; 0 if none is."""
        ends = self._prefixes[slot].ends
        return ends[0] if ends else 0

    def keep(self, slot: int, num_tokens: int) -> None:
        """The pass that is planned leaves the slot at its next end, after so many tokens."""
        own = self._prefixes[slot]
        key = own.keys[own.ends.pop(0) - 1]
        if key in self._kept:
            # It was not found, since pages before its own are gone.
            self._kept.move_to_end(key)
            return
        if not self._free:
            self._free.append(self._kept.popitem(last=False)[1])
        self._new[key] = self._free.pop()
        self._copies.append((slot, num_tokens, self._new[key]))

    def close(self, slot: int) -> None:
        """The slot's sequence has ended, or does not begin yet."""
        del self._prefixes[slot]
        self._begun.pop(slot, None)

    def forget(self, key: bytes) -> None:
        """No sequence finds this page any more."""
        if key in self._kept:
            self._free.append(self._kept.pop(key))

    def drain(self) -> list[Copy]:
        """The copies around the pass that is planned: before it those that sequences begin with, after it
        those that are kept."""
        copies = [(slot, 0, number) for slot, number in self._begun.items()] + self._copies
        self._kept.update(self._new)
        self._begun, self._copies, self._new = {}, [], {}
        return copies
