"""The index of :mod:`specdist.policies.ngrams.ngram_index` written out in Python: what ``kernels/ngrams.c``
has to do, bit by bit.

R rows, C tokens of all of them, one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specdist.policies.ngrams.ngram_index import (
    ALL,
    CLASS_STARTS,
    MAX_MATCH,
    MAX_PLACES,
    PRIOR_TOKENS,
    NgramState,
    Proposals,
)
from specdist.policies.ngrams.text_store import NO_TEXTS, TextSettings, TextStore

NUM_CLASSES = len(CLASS_STARTS)
NO_TOKEN = -1
GRAM = 4
# Of a running sequence: places of a block, one before and one after its tokens, and tokens that are repeated.
BLOCK, OVERLAP = 64, 8
MULTIPLIER, WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


class PlainIndex:
    """The same interface as that of the compiled index, without learning together."""

    def __init__(self, *, num_slots: int, max_length: int, texts: TextSettings = NO_TEXTS) -> None:
        self._state = NgramState(num_slots, max_length, adds_sequences=texts.adds_sequences)
        if texts.num_tokens:
            self._state.store = PlainStore(texts.num_tokens)

    def add_text(self, token_ids: np.ndarray) -> None:
        assert self._state.store is not None
        self._state.store.add(token_ids)

    def begin(self, slots: np.ndarray, num_prompt_tokens: np.ndarray, are_resumed: Any = False) -> None:
        self._state.begin(slots, num_prompt_tokens, np.zeros(len(slots), bool) | are_resumed)

    def append(self, slots_R: np.ndarray, counts_R: np.ndarray, token_ids_C: np.ndarray) -> None:
        state = self._state
        for slot, count in zip(slots_R.tolist(), counts_R.tolist(), strict=True):
            if state.adds_sequences and state.num_unstored[slot] == ALL:
                state.num_unstored[slot] = max(count, int(state.num_prompt_tokens[slot]))
        append_tokens(state, slots_R, counts_R, token_ids_C)

    def propose(self, slots_R: np.ndarray, limits_R: np.ndarray, *, least_chance: float = 0.0) -> Proposals:
        return Proposals(*propose_tokens(self._state, slots_R, limits_R, np.full(len(slots_R), least_chance)))


class PlainStore(TextStore):
    """The same arrays, without compiled code."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens, library=None)  # type: ignore[arg-type]

    def add(self, token_ids: np.ndarray) -> None:
        text = token_ids[-(self.capacity - 1) :]
        for index, token in enumerate([NO_TOKEN, *text.tolist()], -1):
            place = int(self.count[0])
            self.count[0] += 1
            self._put(place, token, 0)
            if index + 1 >= GRAM:
                self._chain(place, text[: index + 1])

    def add_token(self, tokens: np.ndarray, tail: int, owner: int) -> int:
        """The last of a running sequence's tokens. ``tail``: where its text goes on, or -1; returns where it
        goes on after this one."""
        overlap = min(OVERLAP, len(tokens) - 1)
        place = tail
        if tail < 0 or not self.is_kept(tail) or tail % BLOCK == BLOCK - 1:
            begin = -(-int(self.count[0]) // BLOCK) * BLOCK
            for empty in range(int(self.count[0]), begin + BLOCK):
                self._put(empty, NO_TOKEN, owner)
            self.count[0] = begin + BLOCK
            place = begin + 1 + overlap
            for back in range(overlap, 0, -1):
                self._put(place - back, int(tokens[-1 - back]), owner)
            if tail >= 0 and self.is_kept(tail):
                self.earlier[tail % self.capacity] = place
            elif len(tokens) > GRAM:
                # What the first tokens come after: the end of the prompt.
                self._chain(place - 1, tokens[:-1])
        self._put(place, int(tokens[-1]), owner)
        if len(tokens) >= GRAM:
            self._chain(place, tokens)
        return place + 1

    def _put(self, place: int, token: int, owner: int) -> None:
        self.tokens[place % self.capacity] = token
        self.owners[place % self.capacity] = owner
        self.earlier[place % self.capacity] = -1

    def _chain(self, place: int, tokens: np.ndarray) -> None:
        head = self.head_of(tokens[-GRAM:])
        self.earlier[place % self.capacity] = self.heads[head]
        self.heads[head] = place

    def token_at(self, place: int) -> int:
        return int(self.tokens[place % self.capacity])

    def is_kept(self, place: int) -> bool:
        return place > self.count[0] - self.capacity

    def next_place(self, place: int) -> int:
        """Where the text goes on after a place, or -1."""
        place += 1
        if place >= self.count[0]:
            return -1
        if self.token_at(place) == NO_TOKEN:
            place = int(self.earlier[place % self.capacity])
        return place if place >= 0 and self.is_kept(place) else -1

    def text_after(self, place: int, limit: int) -> np.ndarray:
        """At most so many tokens of the text that goes on after a place."""
        found: list[int] = []
        place = self.next_place(place) if self.is_kept(place) else -1
        while place >= 0 and len(found) < limit:
            found.append(self.token_at(place))
            place = self.next_place(place)
        return np.array(found, np.int64)

    def head_of(self, gram: np.ndarray) -> int:
        """The index of a gram's chain."""
        word = 0
        for token in gram.tolist():
            word = ((word ^ (token & 0xFFFFFFFF)) * MULTIPLIER) & WORD
        return word >> (64 - self.num_head_bits)

    def longest_match(
        self, tokens: np.ndarray, max_match: int, max_places: int, owner: int
    ) -> tuple[int, int]:
        """Place and length of the longest match of the last of these tokens in others' texts, the latest of
        equal ones; (-1, 0) where there is none."""
        best_place, best_length, num_places = -1, 0, 0
        place = int(self.heads[self.head_of(tokens[-GRAM:])]) if len(tokens) >= GRAM else -1
        first = int(self.count[0]) - self.capacity + max_match
        while place >= max(0, first) and num_places < max_places:
            longest, length = min(max_match, len(tokens), place + 1), 0
            while length < longest and self.token_at(place - length) == tokens[-1 - length]:
                length += 1
            num_places += length >= GRAM
            if self.owners[place % self.capacity] != owner:
                if length >= GRAM and length > best_length and self.next_place(place) >= 0:
                    best_place, best_length = place, length
                if length == max_match:
                    break
            place = int(self.earlier[place % self.capacity])
        return best_place, best_length


def append_tokens(state: NgramState, slots_R: np.ndarray, counts_R: np.ndarray, tokens_C: np.ndarray) -> None:
    """What was predicted is compared with what came; then the tokens' own matches are looked up."""
    ends_R = counts_R.cumsum()
    for slot, begin, end in zip(slots_R.tolist(), (ends_R - counts_R).tolist(), ends_R.tolist(), strict=True):
        # The tokens of the prompt but its last: nothing is predicted after them.
        first = int(state.num_tokens[slot])
        num_unseen = min(max(0, int(state.num_prompt_tokens[slot]) - 1 - first), end - begin - 1)
        if num_unseen > 0:
            state.tokens[slot, first : first + num_unseen] = tokens_C[begin : begin + num_unseen]
            state.num_tokens[slot] += num_unseen
            state.match_places[slot], state.match_lengths[slot] = -1, 0
            state.store_places[slot], state.store_lengths[slot] = -1, 0
        for token in tokens_C[begin + max(0, num_unseen) : end].tolist():
            _append(state, slot, token)


def _append(state: NgramState, slot: int, token: int) -> None:
    position, place = int(state.num_tokens[slot]), int(state.match_places[slot])
    tokens = state.tokens[slot]
    if position >= state.num_prompt_tokens[slot] and place >= 0:
        its_class = state.class_of[state.match_lengths[slot]]
        state.num_right[slot, its_class] += tokens[place + 1] == token
        state.num_tried[slot, its_class] += 1
    tokens[position] = token
    state.num_tokens[slot] = position + 1
    if isinstance(state.store, PlainStore):
        _follow_store(state, state.store, slot, position)
        if state.adds_sequences and position >= state.num_unstored[slot]:
            state.store_tails[slot] = state.store.add_token(
                tokens[: position + 1], int(state.store_tails[slot]), int(state.owners[slot])
            )
    state.match_places[slot], state.match_lengths[slot] = _longest_match(state, tokens[: position + 1])


def _follow_store(state: NgramState, store: PlainStore, slot: int, position: int) -> None:
    """What the store predicted is compared with the token that came; then its next match is looked up."""
    tokens = state.tokens[slot, : position + 1]
    place, length = int(state.store_places[slot]), int(state.store_lengths[slot])
    is_kept = place >= 0 and store.is_kept(place - MAX_MATCH)
    following = store.next_place(place) if is_kept else -1
    is_right = following >= 0 and store.token_at(following) == tokens[-1]
    if position >= state.num_prompt_tokens[slot] and place >= 0:
        its_class = NUM_CLASSES + state.class_of[length]
        state.num_right[slot, its_class] += is_right
        state.num_tried[slot, its_class] += 1
    if is_right and store.next_place(following) >= 0:
        found = following, min(length + 1, MAX_MATCH)
    else:
        owner = int(state.owners[slot])
        found = store.longest_match(tokens, MAX_MATCH, MAX_PLACES, owner)
    state.store_places[slot], state.store_lengths[slot] = found


def _longest_match(state: NgramState, tokens: np.ndarray) -> tuple[int, int]:
    """Place and length: of the latest places that end in the same two tokens, the longest match, the latest
    of equal ones. (-1, 0) where there is none."""
    ends_alike = (tokens[1:-1] == tokens[-1]) & (tokens[:-2] == tokens[-2]) if len(tokens) > 1 else tokens[:0]
    places = np.flatnonzero(ends_alike)[::-1][:MAX_PLACES] + 1
    best_place, best_length = -1, 0
    for place in places.tolist():
        longest = min(MAX_MATCH, place + 1)
        one, other = tokens[place + 1 - longest : place + 1], tokens[len(tokens) - longest :]
        differs = np.flatnonzero(one[::-1] != other[::-1])
        length = int(differs[0]) if len(differs) else longest
        if length > best_length:
            best_place, best_length = place, length
    return best_place, best_length


def propose_tokens(
    state: NgramState, slots_R: np.ndarray, limits_R: np.ndarray, least_chances_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [C] and their chances [C], and how many each row has [R]: of the row's own text or of the store,
    whichever is expected to be right for longer."""
    tokens: list[np.ndarray] = [np.zeros(0, np.int64)]
    chances: list[np.ndarray] = [np.zeros(0)]
    lengths_R = np.zeros(len(slots_R), np.int64)
    for row, (slot, limit) in enumerate(zip(slots_R.tolist(), limits_R.tolist(), strict=True)):
        place, sources = int(state.match_places[slot]), []
        if place >= 0:
            period = int(state.num_tokens[slot]) - 1 - place
            text = state.tokens[slot, place + 1 + np.arange(limit) % period]
            sources.append((text, int(state.match_lengths[slot]), 0))
        if isinstance(state.store, PlainStore) and state.store_places[slot] >= 0:
            text = state.store.text_after(int(state.store_places[slot]), limit)
            sources.append((text, int(state.store_lengths[slot]), NUM_CLASSES))
        rates = (state.num_right[slot] + state.prior_right) / (state.num_tried[slot] + PRIOR_TOKENS)
        best = 0.0
        for text, length, first_class in sources:
            lengths = np.minimum(length + np.arange(len(text)), MAX_MATCH)
            reach = rates[first_class + state.class_of[lengths]].cumprod()
            unlikely = np.flatnonzero(reach < least_chances_R[row])
            num = int(unlikely[0]) if len(unlikely) else len(text)
            worth = float(reach[:num].cumsum()[-1]) if num else 0.0
            if worth > best:
                best, lengths_R[row] = worth, num
                found = text[:num].astype(np.int64), reach[:num]
        if lengths_R[row]:
            tokens.append(found[0])
            chances.append(found[1])
    return np.concatenate(tokens), np.concatenate(chances), lengths_R
