"""The index of :mod:`specdist.drafters.ngram_index` in NumPy, for machines without a C compiler; slower, with
the same results as ``kernels/ngrams.c``, bit by bit.

R rows, C tokens of all of them, one after the other.
"""

from __future__ import annotations

import numpy as np

from specdist.drafters.ngram_state import NgramState
from specdist.drafters.text_store import TextStore


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
    if state.store is not None:
        _follow_store(state, state.store, slot, position)
        if state.adds_sequences and position >= state.num_unstored[slot]:
            state.store_tails[slot] = state.store.add_token(
                tokens[: position + 1], int(state.store_tails[slot]), int(state.owners[slot])
            )
    state.match_places[slot], state.match_lengths[slot] = _longest_match(state, tokens[: position + 1])


def _follow_store(state: NgramState, store: TextStore, slot: int, position: int) -> None:
    """What the store predicted is compared with the token that came; then its next match is looked up."""
    tokens = state.tokens[slot, : position + 1]
    place, length = int(state.store_places[slot]), int(state.store_lengths[slot])
    is_kept = place >= 0 and store.is_kept(place - state.max_match)
    following = store.next_place(place) if is_kept else -1
    is_right = following >= 0 and store.token_at(following) == tokens[-1]
    if position >= state.num_prompt_tokens[slot] and place >= 0:
        its_class = state.num_classes + state.class_of[length]
        state.num_right[slot, its_class] += is_right
        state.num_tried[slot, its_class] += 1
    if is_right and store.next_place(following) >= 0:
        found = following, min(length + 1, state.max_match)
    else:
        owner = int(state.owners[slot])
        found = store.longest_match(tokens, state.max_match, state.max_places, owner)
    state.store_places[slot], state.store_lengths[slot] = found


def _longest_match(state: NgramState, tokens: np.ndarray) -> tuple[int, int]:
    """Place and length: of the latest places that end in the same two tokens, the longest match, the latest
    of equal ones. (-1, 0) where there is none."""
    ends_alike = (tokens[1:-1] == tokens[-1]) & (tokens[:-2] == tokens[-2]) if len(tokens) > 1 else tokens[:0]
    places = np.flatnonzero(ends_alike)[::-1][: state.max_places] + 1
    best_place, best_length = -1, 0
    for place in places.tolist():
        longest = min(state.max_match, place + 1)
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
        if state.store is not None and state.store_places[slot] >= 0:
            text = state.store.text_after(int(state.store_places[slot]), limit)
            sources.append((text, int(state.store_lengths[slot]), state.num_classes))
        rates = (state.num_right[slot] + state.prior_right) / (state.num_tried[slot] + state.prior_tried)
        best = 0.0
        for text, length, first_class in sources:
            lengths = np.minimum(length + np.arange(len(text)), state.max_match)
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
