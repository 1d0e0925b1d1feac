"""Runs a P-EAGLE draft: in a round's first step one pass over what EAGLE-3 would run, and over mask tokens.

Committed tokens are pairs with the states before them, whose keys and values are kept, up to the next token,
from whose output the first token is drawn. The masks after it see it, all before it, and the masks before
themselves; later pairs overwrite what they leave. Tokens that a constraint forces stay masks: no state is
before them.

A sequences, B tokens of a block, T tokens of the batch, N tokens, E hidden size, v vocabulary of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.kernel import PagedKernel
from specdist.models.batch.flat import FlatBatch, PassOutputs
from specdist.models.cache.key_value import KeyValueCache
from specdist.models.draft_models.eagle3 import PEAGLE
from specdist.models.drafters.block_runner import BlockRunner, Blocks
from specdist.models.drafters.eagle3_runner import Eagle3Pass
from specdist.models.drafters.runner import DrafterRunner
from specdist.sampling.uploads import upload


@dataclass(frozen=True)
class MaskedBatch(FlatBatch):
    """Pairs, and the masks after them."""

    are_masks_T: np.ndarray

    @property
    def is_mask_T(self) -> np.ndarray:
        return self.are_masks_T


class ParallelPass(Eagle3Pass):
    """Contexts run as EAGLE-3's."""

    kind = PEAGLE

    @torch.inference_mode()
    def bind(self, cache: KeyValueCache, kernel: PagedKernel | None) -> None:
        super().bind(cache, kernel)
        assert self._states is not None
        self._states[self.no_state] = self._model.fused(self._model.mask_hidden[0])[0].to(cache.dtype)

    def step(self, *inputs: Any) -> PassOutputs:
        """In the place of logits, output states beside logits of the draft's vocabulary: [N, E + v]."""
        hidden_NE = self.outputs(*inputs)
        return PassOutputs(torch.cat([hidden_NE, self._model.own_logits(hidden_NE)], dim=-1), hidden_NE)


class ParallelRunner(BlockRunner):
    """Contexts wait for their states, as those of EAGLE-3."""

    pass_class = ParallelPass

    def forward(self, batch: FlatBatch, logits_index: Any) -> Tensor:
        if len(logits_index):
            return super().forward(batch, logits_index)
        return DrafterRunner.forward(self, batch, logits_index)

    def _run_blocks(self, blocks: Blocks, batch: FlatBatch) -> tuple[tuple[Tensor, Tensor], int]:
        assert isinstance(self.torch_pass, ParallelPass)
        places_T = batch.positions_T - self._num_states[batch.slots_T]
        kept = np.flatnonzero(places_T <= 0)
        (kept_on_device,) = upload(self.device, kept)
        token_ids_T = torch.as_tensor(batch.token_ids_T, device=self.device)[kept_on_device]
        pairs = FlatBatch(token_ids_T, batch.slots_T[kept], batch.positions_T[kept])
        next_A = np.flatnonzero(places_T[kept] == 0)
        assert (pairs.slots_T[next_A] == blocks.slots_A).all(), (
            "a next token of each sequence, in their order"
        )
        num_blocks, num_masks = len(blocks.slots_A), blocks.token_ids_AB.shape[1] - 1
        lines_N = np.append(self._lines[pairs.slots_T], np.arange(num_blocks).repeat(num_masks))
        after_AM = blocks.starts_A[:, None] + 1 + np.arange(num_masks)
        positions_N = np.append(pairs.positions_T, after_AM.ravel())
        order_N = np.lexsort((positions_N, lines_N))
        (order_on_device_N,) = upload(self.device, order_N)
        masks = token_ids_T.new_full((after_AM.size,), self.model.config.mask_token_id)
        flat = MaskedBatch(
            torch.cat([token_ids_T, masks])[order_on_device_N],
            lines_N[order_N],
            positions_N[order_N],
            order_N >= len(pairs),
        )
        asked_N = np.flatnonzero(flat.positions_T >= blocks.starts_A[flat.slots_T])
        return self._rows(blocks, flat, asked_N), len(flat)
