"""Candidates from memory where a constraint says which tokens may come next.

A candidate that is not allowed would be rejected for certain, so the block ends before it. Where a single
token is allowed it is the next one for certain, whatever memory says: the block goes on with it, also where
memory has nothing to propose.

R sequences, C candidates of all of them, one after the other, N positions, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from specdist.engine.target.pipeline import LogitsPipeline
from specdist.policies.ngrams.ngram_index import Proposals
from specdist.sampling.constraints.matcher import WORD_BITS, only_tokens
from specdist.sampling.distributions import NOT_FINITE
from specdist.utils.ranges import arange_segments, places_from


class AllowedTokens:
    """Of one side. ``pipeline``: knows the rows' masks and tokens; None where all tokens are allowed."""

    def __init__(self, pipeline: LogitsPipeline | None, stop_token_ids: Collection[int]) -> None:
        self._pipeline = pipeline if pipeline is not None and pipeline.has_masks else None
        # The last entries are those of all other tokens, and of NOT_FINITE.
        self._is_stop = np.zeros(max(stop_token_ids, default=0) + 1 - NOT_FINITE, bool)
        self._is_stop[list(stop_token_ids)] = True

    def is_stop(self, token_ids: np.ndarray) -> np.ndarray:
        is_stop: np.ndarray = self._is_stop[np.minimum(token_ids, len(self._is_stop) - 1)]
        return is_stop

    def of(
        self, found: Proposals, slots_R: np.ndarray, begins_R: np.ndarray, limits_R: np.ndarray
    ) -> Proposals:
        """What of the proposals is allowed, and what is certain after it: nothing after a stop token, and at
        most ``limits_R`` of each.

        Args:
            begins_R: positions of the first proposed tokens. All tokens before them are in the pipeline's
                table, where the candidates are written, too.
        """
        found = found.until(self.is_stop(found.token_ids_C))
        if self._pipeline is None:
            return found
        table = self._pipeline.token_ids
        table[places_from(slots_R, begins_R, found.lengths_R)] = found.token_ids_C
        # After each block one position more, if there is room for a token.
        asked_R = np.minimum(found.lengths_R + 1, limits_R)
        masks_NW = self._pipeline.masks_of_lines(*places_from(slots_R, begins_R, asked_R))
        if masks_NW is None:
            return found
        starts_R, only_N = np.cumsum(asked_R) - asked_R, only_tokens(masks_NW)
        given_R, lengths_R = found.lengths_R, found.lengths_R.copy()
        lines_C, depths_C = np.repeat(np.arange(len(slots_R)), given_R), arange_segments(given_R)
        index_C, words_C = starts_R[lines_C] + depths_C, found.token_ids_C // WORD_BITS
        is_allowed_C = (masks_NW[index_C, words_C] >> (found.token_ids_C % WORD_BITS)) & 1 == 1
        np.minimum.at(lengths_R, lines_C[~is_allowed_C], depths_C[~is_allowed_C])
        # The chance of a token after those before it, which is 1 where no other is allowed.
        rates_C = found.chances_C / np.where(depths_C > 0, np.r_[1.0, found.chances_C[:-1]], 1.0)
        rates_C = np.where(only_N[index_C] == found.token_ids_C, 1.0, rates_C)
        forced_R = np.full(len(slots_R), -1)
        is_open_R = lengths_R < asked_R
        forced_R[is_open_R] = only_N[(starts_R + lengths_R)[is_open_R]]
        added = self._forced_after(forced_R, slots_R, begins_R + lengths_R, limits_R - lengths_R)
        tokens, chances = [np.zeros(0, np.int64)], [np.zeros(0)]
        begins = (np.cumsum(given_R) - given_R).tolist()
        for row, (begin, length) in enumerate(zip(begins, lengths_R.tolist(), strict=True)):
            tokens.append(np.r_[found.token_ids_C[begin : begin + length], added[row]].astype(np.int64))
            chances.append(np.r_[rates_C[begin : begin + length], np.ones(len(added[row]))].cumprod())
        return Proposals(
            np.concatenate(tokens),
            np.concatenate(chances),
            np.array([len(each) for each in tokens[1:]], np.int64),
        )

    def _forced_after(
        self, forced_R: np.ndarray, slots_R: np.ndarray, ends_R: np.ndarray, room_R: np.ndarray
    ) -> list[list[int]]:
        """The tokens from these positions on that are the only ones allowed, one after the other; the first
        of them, or -1, is known."""
        assert self._pipeline is not None
        added: list[list[int]] = [[] for _ in slots_R]
        rows = np.flatnonzero((forced_R >= 0) & (room_R > 0))
        tokens = forced_R[rows]
        while len(rows):
            self._pipeline.token_ids[slots_R[rows], ends_R[rows]] = tokens
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                added[row].append(token)
            counts = np.array([len(added[row]) for row in rows.tolist()])
            rows = rows[~self.is_stop(tokens) & (counts < room_R[rows])]
            ends_R = ends_R + 1
            masks_NW = self._pipeline.masks_of_lines(slots_R[rows], ends_R[rows]) if len(rows) else None
            tokens = np.zeros(0, np.int64) if masks_NW is None else only_tokens(masks_NW)
            rows, tokens = rows[: len(tokens)][tokens >= 0], tokens[tokens >= 0]
        return added
