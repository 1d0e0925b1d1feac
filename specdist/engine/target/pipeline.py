"""The processing of logits on one side of a round: its rows, its masker, and the processors.

N positions, v token ids of a slice of the vocabulary, T flat tokens, L lines.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.engine.messages.interfaces import VerifyInput
from specdist.engine.messages.opened import OpenedSequences
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.processors import LogitsProcessors, TokenMasker
from specdist.sampling.processing.row_filters import RowFilters
from specdist.sampling.processing.row_table import QueryPositions, RowTable


class Processed(NamedTuple):
    """Logits before temperature and filters, and the numbers of those, if they are not the same for all."""

    scores_Nv: Tensor
    filters: RowFilters | None


class LogitsPipeline:
    """One side's: of a rank of the target, or of the draft."""

    def __init__(
        self,
        settings: SamplingSettings,
        token_ids: np.ndarray,
        *,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        ids: range | None = None,
        masker: TokenMasker | None = None,
    ) -> None:
        """
        Args:
            token_ids: [L, most tokens], by line and position: see :class:`RowTable`.
            ids: of the slice; by default all of ``vocab_size``.
            masker: of rank 0 of the target, or of the draft.
        """
        assert settings.processing is not None
        self.has_masks = settings.processing.has_masks
        self._table = RowTable(settings.processing.defaults, num_slots, token_ids)
        self._processors = LogitsProcessors(settings.processing, ids or range(vocab_size), device)
        self._vocab_size = vocab_size
        self._device = device
        self._masker = masker
        # Lines after those of the slots are branches', equally many of each.
        num_branches = len(token_ids) // num_slots - 1
        self._slot_of = np.r_[np.arange(num_slots), np.repeat(np.arange(num_slots), num_branches)]

    @property
    def token_ids(self) -> np.ndarray:
        """[L, most tokens]."""
        return self._table.token_ids

    def open(self, opened: OpenedSequences) -> None:
        """Sequences begin."""
        if len(opened.slots):
            self._table.fill(opened.slots, opened.options_MF, opened.num_prompt_tokens, opened.prefixes)
            if self._masker is not None:
                self._masker.open(opened.slots.tolist(), opened.constraints)

    def asked(self, slots_N: np.ndarray, lines_N: np.ndarray, positions_N: np.ndarray) -> QueryPositions:
        return QueryPositions(self._table, slots_N, lines_N, positions_N)

    def asked_of(self, verify_input: VerifyInput) -> QueryPositions:
        """Of the target's pass, whose sequences and tokens are noted."""
        self.open(verify_input.opened)
        batch = verify_input.batch
        self._table.token_ids[batch.slots_T, batch.positions_T] = np.asarray(batch.token_ids_T)
        slots_N = batch.slots_T[verify_input.logits_indices_N]
        return self.asked(slots_N, slots_N, verify_input.positions_N)

    def process_drafted(self, logits_AV: Tensor, places: tuple[np.ndarray, np.ndarray]) -> Processed:
        """Of the draft's step, at these draft slots and positions."""
        asked = self.asked(self._slot_of[places[0]], *places)
        return self.process(logits_AV[:, : self._vocab_size], asked, self.masks(asked))

    def masks_of_lines(self, lines_A: np.ndarray, positions_A: np.ndarray) -> np.ndarray | None:
        """As :meth:`masks`, of one position of each of these draft slots."""
        return self.masks(self.asked(self._slot_of[lines_A], lines_A, positions_A))

    def forced(self, lines_A: np.ndarray, positions_A: np.ndarray, most_A: np.ndarray) -> list[list[int]]:
        """The tokens from each position on that are the only ones allowed: see :class:`TokenMasker`."""
        assert self._masker is not None
        return self._masker.forced(self.asked(self._slot_of[lines_A], lines_A, positions_A), most_A.tolist())

    def masks(self, asked: QueryPositions) -> np.ndarray | None:
        """int32 [N, W]; None if there are none."""
        return None if self._masker is None else self._masker.masks(asked)

    def process(self, logits_Nv: Tensor, asked: QueryPositions, masks_NW: np.ndarray | None) -> Processed:
        return Processed(
            self._processors.process(logits_Nv, asked, masks_NW),
            RowFilters.of(asked, self._vocab_size, self._device),
        )
