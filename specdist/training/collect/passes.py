"""Splitting texts into groups that fit the cache, and passes of a bounded number of tokens.

R texts of a group, one per slot; T flat tokens, N of them whose logits are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.training.collect.texts import Text
from specdist.utils.ranges import arange_segments

# Maximum tokens of a pass: enough to keep a GPU busy, and 0.25 GB of logits with 128 thousand tokens.
PASS_TOKENS = 512


def groups_of(
    texts: Sequence[Text], *, num_slots: int, num_pages: int, page_size: int
) -> Iterator[list[Text]]:
    """The texts in order, as many at a time as fit the slots and pages. Each has room for one more token, the
    draft token after its last one."""
    group: list[Text] = []
    num_taken = 0
    for text in texts:
        needed = _num_pages(text, page_size)
        if group and (len(group) == num_slots or num_taken + needed > num_pages):
            yield group
            group, num_taken = [], 0
        group.append(text)
        num_taken += needed
    if group:
        yield group


def pages_of(group: Sequence[Text], page_size: int) -> PageUpdates:
    """Consecutive pages for each text; those of earlier groups are replaced."""
    counts_R = np.array([_num_pages(text, page_size) for text in group], np.int64)
    return PageUpdates(
        np.repeat(np.arange(len(group)), counts_R).astype(np.int32),
        arange_segments(counts_R).astype(np.int32),
        np.arange(counts_R.sum(), dtype=np.int32),
    )


def _num_pages(text: Text, page_size: int) -> int:
    return text.num_context // page_size + 1


@dataclass(frozen=True)
class AskedTokens:
    """Tokens to run, and those of them whose logits are needed."""

    batch: FlatBatch
    index_N: np.ndarray


def contexts_of(group: Sequence[Text]) -> AskedTokens:
    """All tokens before a place; logits are needed of the tokens right before the places, in their order."""
    lengths_R = np.array([text.num_context for text in group], np.int64)
    starts_R = np.cumsum(lengths_R) - lengths_R
    batch = FlatBatch(
        np.array([token for text in group for token in text.token_ids[: text.num_context]], np.int64),
        np.repeat(np.arange(len(group)), lengths_R),
        arange_segments(lengths_R),
    )
    asked = [start + text.places_N - 1 for start, text in zip(starts_R, group, strict=True)]
    return AskedTokens(batch, np.concatenate(asked))


def in_passes(tokens: AskedTokens) -> Iterator[AskedTokens]:
    """The same in passes of at most ``PASS_TOKENS``; the cache connects a text's parts."""
    batch, index_N = tokens.batch, tokens.index_N
    for begin in range(0, len(batch), PASS_TOKENS):
        end = min(begin + PASS_TOKENS, len(batch))
        part = FlatBatch(batch.token_ids_T[begin:end], batch.slots_T[begin:end], batch.positions_T[begin:end])
        yield AskedTokens(part, index_N[(index_N >= begin) & (index_N < end)] - begin)
