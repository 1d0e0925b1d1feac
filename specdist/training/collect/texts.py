"""The prefixes that tokens are drafted after, which are the target's responses or SPRINTER's four kinds, in
groups that fit the cache and in passes of a bounded number of tokens.

Of SPRINTER's kinds (section 3.2: original prefixes, which are the prompt's own, completions of the draft
alone, of the target alone, and of both), each prompt gives the same number of prefixes: as many as the kind
with the fewest has. R texts of a group, one per slot; T flat tokens, N of them whose logits are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.models.heads.examples import PREFIX_KINDS, PrefixKind
from specdist.sampling.keys import stream_key
from specdist.sampling.random import Purpose, uniforms
from specdist.utils.ranges import arange_segments

# Sample 0 of a row is the target's response; the other texts and the draft tokens have other numbers.
DRAFT_SAMPLE, MIXED_SAMPLE, FIRST_DRAWN_SAMPLE = 1, 2, 3
# The stretches of a mixed completion, of random lengths, which draft and target write in turn.
NUM_STRETCHES = 4
# Maximum tokens of a pass: enough to keep a GPU busy, and 0.25 GB of logits with 128 thousand tokens.
PASS_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Text:
    """A sequence and its places, ascending: at place p >= 1 a token is drafted after the first p tokens.

    ``stream_key`` is the key of the draft tokens' random numbers.
    """

    row_id: int
    kind: PrefixKind
    token_ids: list[int]
    places_N: np.ndarray
    stream_key: int

    @property
    def num_context(self) -> int:
        """Number of tokens before the last draft token."""
        return int(self.places_N[-1]) if len(self.places_N) else 0


def drawing_key(seed: int, row_id: int, kind: PrefixKind) -> int:
    """The key of the random numbers of a text's draft tokens."""
    return stream_key(seed, row_id, FIRST_DRAWN_SAMPLE + PREFIX_KINDS.index(kind))


def response_text(row_id: int, prompt_ids: list[int], response_ids: list[int], *, seed: int) -> Text:
    """The target's response, with a place at each of its tokens (SpecDec++, section 4.4)."""
    return Text(
        row_id=row_id,
        kind="target",
        token_ids=prompt_ids + response_ids,
        places_N=len(prompt_ids) + np.arange(len(response_ids)),
        stream_key=drawing_key(seed, row_id, "target"),
    )


def verifier_texts(
    row_id: int,
    prompt_ids: list[int],
    *,
    draft_ids: list[int],
    target_ids: list[int],
    mixed_ids: list[int],
    by_draft: list[bool],
    seed: int,
    max_seq_len: int,
    stop_token_ids: frozenset[int],
) -> list[Text]:
    """Four texts with the same number of places, drawn at random from all places of the kind.

    Completions exclude the prompt; ``by_draft`` says which tokens of the mixed completion the draft wrote.
    There is no place after a stop token, nor at position ``max_seq_len`` or beyond.
    """
    num_prompt = len(prompt_ids)
    sequences: Mapping[PrefixKind, list[int]] = {
        "original": prompt_ids,
        "draft": prompt_ids + draft_ids,
        "target": prompt_ids + target_ids,
        "mixed": prompt_ids + mixed_ids,
    }
    firsts: Mapping[PrefixKind, int] = {
        "original": 1,
        "draft": num_prompt + 1,
        "target": num_prompt + 1,
        "mixed": num_prompt + _first_of_both(by_draft),
    }
    all_places = {
        kind: np.arange(firsts[kind], min(_end(sequences[kind], stop_token_ids), max_seq_len - 1) + 1)
        for kind in PREFIX_KINDS
    }
    num_each = min(map(len, all_places.values()))
    texts = []
    for kind in PREFIX_KINDS:
        key = drawing_key(seed, row_id, kind)
        places_N = all_places[kind]
        zeros_N = torch.zeros(len(places_N), dtype=torch.int64)
        order = uniforms(zeros_N + key, torch.from_numpy(places_N), zeros_N, Purpose.NEXT_TOKEN).argsort()
        chosen_N = np.sort(places_N[order[:num_each].numpy()])
        texts.append(
            Text(row_id=row_id, kind=kind, token_ids=sequences[kind], places_N=chosen_N, stream_key=key)
        )
    return texts


def _end(token_ids: list[int], stop_token_ids: frozenset[int]) -> int:
    """The last place of a sequence."""
    return len(token_ids) - (token_ids[-1] in stop_token_ids)


def _first_of_both(by_draft: list[bool]) -> int:
    """Length of the shortest part of a mixed completion with tokens of both models; more than its length if
    there is none."""
    if len(set(by_draft)) < 2:
        return len(by_draft) + 1
    return by_draft.index(not by_draft[0]) + 1


def stretch_lengths(row_id: int, *, seed: int, max_new_tokens: int) -> list[int]:
    """Lengths of a mixed completion's stretches, which add up to ``max_new_tokens``; some may be 0."""
    key = stream_key(seed, row_id, MIXED_SAMPLE)
    places = torch.arange(NUM_STRETCHES - 1)
    cuts = uniforms(torch.full_like(places, key), places, torch.zeros_like(places), Purpose.COUPLE)
    bounds = (cuts.sort().values * (max_new_tokens + 1)).long().tolist()
    return np.diff([0, *bounds, max_new_tokens]).tolist()


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
