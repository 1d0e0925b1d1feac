"""One pipeline of logits processing, the same at every position of a block, for target and draft alike.

Order and meaning are those of transformers' processors; presence and frequency penalties, which it lacks,
stand after its repetition penalty, as in vLLM: logit bias, penalties, bad words, the least length, masks,
suppressed tokens; then temperature, top-k, top-p, min-p (:mod:`specdist.sampling.processing.row_filters`).

What is asked of whom in a pass:

- The target asks for all positions of a block, once per pass, with its candidates; every rank of a
  vocabulary-parallel target processes its own slice, without gathering. Masks come from rank 0, which alone
  has a masker, and are made while the pass runs.
- The draft asks for one position per line and step: candidates, tokens ahead after them, and branches,
  each on a line of its own. It has a masker of its own where it is a process of its own. With masks, the host
  knows every drawn token before the next one is asked for.
- Colocated, both sides ask in one process, each with its own table and masker.

N positions, v token ids of a slice of the vocabulary, V of all, R lines, K tokens of a block.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdist.sampling.processing.row_table import Processing, QueryPositions, RowTable
from specdist.sampling.uploads import upload

MASK_BITS = 32


class TokenMasker(Protocol):
    """Says which tokens may stand at a position: grammars, budgets. One of each side, on the host.

    It is asked again for positions that it has been asked for before, with other candidates before them
    (after a rejection, in a branch), and for a slot with another row after :meth:`open`; a preempted sequence
    is opened again, with the completion so far in its table. State is to be kept by what is in the table, not
    by what was asked before.
    """

    def open(self, slots: list[int], constraints: list[str]) -> None:
        """New rows are in these slots, each with its constraint; the empty string: none."""

    def masks(self, asked: QueryPositions) -> np.ndarray | None:
        """int32 [N, ceil(V / 32)]: bit i of word w allows token 32 w + i (as llguidance's and xgrammar's
        masks); all bits of a position without a constraint are set. None: no position has one. At least one
        token that can be drawn must be allowed at each."""

    def forced(self, asked: QueryPositions, most_N: list[int]) -> list[list[int]]:
        """Of positions each on a line of its own: the tokens from there on that are the only ones allowed,
        as far as they are known without masks, and at most so many. After a stop token there are none."""

    def failure(self, slot: int) -> str | None:
        """Why no token is allowed in the row of this slot, if it can say nothing more of it."""


def allowed_tokens(masks_NW: Tensor, ids: range) -> Tensor:
    """bool [N, v]: of packed masks, the part of these token ids."""
    first, end = ids.start // MASK_BITS, -(-ids.stop // MASK_BITS)
    if masks_NW.device.type == "cpu":
        bytes_NB = masks_NW[:, first:end].contiguous().numpy().view(np.uint8)
        bits_NV = torch.from_numpy(np.unpackbits(bytes_NB, axis=1, bitorder="little").view(bool))
        return bits_NV[:, ids.start - first * MASK_BITS :][:, : len(ids)]
    shifts = torch.arange(MASK_BITS, device=masks_NW.device, dtype=torch.int32)
    bits_NV = ((masks_NW[:, first:end, None] >> shifts) & 1).flatten(1).bool()
    offset = ids.start - first * MASK_BITS
    return bits_NV[:, offset : offset + len(ids)]


class LogitsProcessors:
    """The processors of a run on one slice of the vocabulary."""

    def __init__(self, processing: Processing, ids: range, device: torch.device) -> None:
        self.processing = processing
        self._ids = ids
        self._device = device
        self._bias_v = self._vector(dict(processing.logit_bias))
        self._suppressed_v = self._vector(dict.fromkeys(processing.suppressed_ids, -np.inf))
        self._end_v = self._vector(dict.fromkeys(processing.end_ids, -np.inf))

    def process(self, logits_Nv: Tensor, asked: QueryPositions, masks_NW: np.ndarray | None = None) -> Tensor:
        """float32 or wider [N, v]: before temperature and filters. The given logits are left as they are."""
        scores_Nv = logits_Nv.to(torch.promote_types(logits_Nv.dtype, torch.float32))
        if self._bias_v is not None:
            scores_Nv = scores_Nv + self._bias_v
        scores_Nv = self._with_penalties(scores_Nv, asked)
        if self.processing.bad_words:
            scores_Nv = self._without_bad_words(scores_Nv, asked)
        if self._end_v is not None:
            is_early_N = asked.num_new_N < self.processing.min_new_tokens
            if is_early_N.any():
                (early_N,) = upload(self._device, is_early_N.astype(np.int64))
                scores_Nv = torch.where(early_N[:, None].bool(), scores_Nv + self._end_v, scores_Nv)
        if masks_NW is not None:
            masks = torch.from_numpy(masks_NW).to(self._device)
            scores_Nv = scores_Nv.where(allowed_tokens(masks, self._ids), -torch.inf)
        if self._suppressed_v is not None:
            scores_Nv = scores_Nv + self._suppressed_v
        return scores_Nv

    def _vector(self, values: dict[int, float]) -> Tensor | None:
        """[v] float32 of numbers by token id; None without any."""
        if not values:
            return None
        vector_v = torch.zeros(len(self._ids))
        for token_id, value in values.items():
            if token_id in self._ids:
                vector_v[token_id - self._ids.start] = value
        return vector_v.to(self._device)

    def _with_penalties(self, scores_Nv: Tensor, asked: QueryPositions) -> Tensor:
        options = asked.table.options_of(asked.slots_N)
        repetition_N, presence_N, frequency_N = (
            options[f"{name}_penalty"] for name in ("repetition", "presence", "frequency")
        )
        if (repetition_N != 1).any():
            seen_Nv = self._counts(asked, np.zeros_like(asked.positions_N)) > 0
            (repetition_N1,) = upload(self._device, repetition_N[:, None])
            repetition_N1 = repetition_N1.to(scores_Nv.dtype)
            penalised_Nv = torch.where(scores_Nv < 0, scores_Nv * repetition_N1, scores_Nv / repetition_N1)
            scores_Nv = torch.where(seen_Nv, penalised_Nv, scores_Nv)
        if presence_N.any() or frequency_N.any():
            counts_Nv = self._counts(asked, asked.table.num_prompt_tokens[asked.slots_N])
            numbers = upload(self._device, frequency_N[:, None], presence_N[:, None])
            frequency_N1, presence_N1 = (number.to(scores_Nv.dtype) for number in numbers)
            scores_Nv = scores_Nv - frequency_N1 * counts_Nv - presence_N1 * (counts_Nv > 0)
        return scores_Nv

    def _counts(self, asked: QueryPositions, begins_N: np.ndarray) -> Tensor:
        """int32 [N, v]: how often each token stands between its begin and the position."""
        is_first_N = np.r_[True, asked.lines_N[1:] != asked.lines_N[:-1]]
        firsts = np.flatnonzero(is_first_N)
        # Each line's tokens are counted once: those before its first position; then those between it and the
        # others.
        counts_Rv = self._histogram(
            asked.table, asked.lines_N[firsts], begins_N[firsts], asked.positions_N[firsts]
        )
        line_of_N = np.cumsum(is_first_N) - 1
        (line_index_N,) = upload(self._device, line_of_N)
        counts_Nv = counts_Rv[line_index_N]
        since_N = np.maximum(asked.positions_N[firsts][line_of_N], begins_N)
        if (asked.positions_N > since_N).any():
            counts_Nv += self._histogram(asked.table, asked.lines_N, since_N, asked.positions_N)
        return counts_Nv

    def _histogram(self, table: RowTable, lines: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> Tensor:
        """int32 [lines, v]: of the tokens from begin to end."""
        lengths = np.maximum(ends - begins, 0)
        offsets = np.arange(lengths.max(initial=0))
        is_used = offsets < lengths[:, None]
        places = np.where(is_used, begins[:, None] + offsets, 0)
        own_ids = table.token_ids[lines[:, None], places] - self._ids.start
        # What is not counted here is counted in a column after the last, and left out.
        is_used &= (own_ids >= 0) & (own_ids < len(self._ids))
        (index,) = upload(self._device, np.where(is_used, own_ids, len(self._ids)))
        counts = torch.zeros(len(lines), len(self._ids) + 1, dtype=torch.int32, device=self._device)
        counts.scatter_add_(1, index, torch.ones_like(index, dtype=torch.int32))
        return counts[:, :-1]

    def _without_bad_words(self, scores_Nv: Tensor, asked: QueryPositions) -> Tensor:
        banned: list[tuple[int, int]] = []
        for *prefix, last in self.processing.bad_words:
            if last not in self._ids:
                continue
            is_match_N = asked.positions_N >= len(prefix)
            for distance, token_id in enumerate(reversed(prefix), 1):
                places_N = np.maximum(asked.positions_N - distance, 0)
                is_match_N &= asked.table.token_ids[asked.lines_N, places_N] == token_id
            banned += [(index, last - self._ids.start) for index in np.flatnonzero(is_match_N).tolist()]
        if not banned:
            return scores_Nv
        index, places = upload(self._device, *np.array(banned, np.int64).T.copy())
        return scores_Nv.index_put((index, places), scores_Nv.new_tensor(-torch.inf))
