"""Runs a P-EAGLE draft: in a round's first step one pass over what EAGLE-3 would run, and over mask tokens.

Committed tokens are pairs with the states before them, whose keys and values are kept, up to the next token,
from whose output the first token is drawn. The masks after it see it, all before it, and the masks before
themselves; nothing of theirs is kept. Tokens that a constraint forces stay masks: no state is before them.

A sequences, B tokens of a block, T tokens of the batch, N tokens, E hidden size, v vocabulary of the draft.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionCall, LayerAttention
from specdist.models.drafters.blocks.block_runner import BlockAttention, BlockRunner, Blocks
from specdist.models.drafters.eagle3 import PEAGLE
from specdist.models.drafters.eagle3_runner import Eagle3Pass
from specdist.models.drafters.runner import DrafterRunner
from specdist.models.passes.flat import FlatBatch
from specdist.models.passes.torch_pass import NOT_ALLOCATED
from specdist.sampling.uploads import upload


class ParallelPass(Eagle3Pass):
    """Contexts run as EAGLE-3's."""

    kind = PEAGLE

    @torch.inference_mode()
    def run_pairs(
        self, pairs: FlatBatch, next_A: np.ndarray, masks: Blocks, pages_SP: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """The output states [A × B, E], and own logits [A × B, v]. ``next_A``: the next tokens among those of
        the pairs; the masks come after them."""
        assert self._cache is not None and self._states is not None, NOT_ALLOCATED
        num_blocks, num_masks = masks.token_ids_AB.shape
        before_T = np.maximum(pairs.positions_T - 1, 0)
        states_TE = self._states[self.places(FlatBatch(before_T, pairs.slots_T, before_T), pages_SP)]
        mask_1E = self._model.fused(self._model.mask_hidden[0]).to(states_TE.dtype)
        mask_positions = masks.starts_A[:, None] - 1 + np.arange(num_masks)
        positions, index_N = upload(
            self._device,
            np.concatenate([before_T, mask_positions.ravel()]),
            np.concatenate([next_A, len(pairs) + np.arange(mask_positions.size)]),
        )
        own = torch.as_tensor(pairs.token_ids_T, dtype=torch.int64, device=self._device)
        outputs_NE = self.outputs(
            torch.cat([own, masks.token_ids_AB.flatten()]),
            positions,
            index_N,
            _WithMasks(
                self._attention(pairs, pages_SP),
                MaskAttention(self._cache, masks, pages_SP, self._device),
                len(pairs),
            ),
            torch.cat([states_TE, mask_1E.expand(mask_positions.size, -1)]),
        )
        first_AE, others_NE = outputs_NE.split([num_blocks, mask_positions.size])
        blocks_ABE = torch.cat([first_AE[:, None], others_NE.view(num_blocks, num_masks, -1)], dim=1)
        hidden_NE = blocks_ABE.flatten(0, 1)
        return hidden_NE, self._model.own_logits(hidden_NE)


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
        masks = torch.full_like(blocks.token_ids_AB[:, 1:], self.model.config.mask_token_id)
        mask_blocks = Blocks(blocks.slots_A, blocks.starts_A + 1, masks)
        found = self.torch_pass.run_pairs(pairs, next_A, mask_blocks, self.pages.pages)
        return found, len(pairs) + masks.numel()


class MaskAttention(BlockAttention):
    """A mask sees those before it, and a context but for its first token."""

    def _seen(self, is_own_AL: np.ndarray) -> np.ndarray:
        is_seen_AL = is_own_AL.copy()
        is_seen_AL[:, 0] = False
        contexts_ABL = np.repeat(is_seen_AL[:, None], self._size, axis=1)
        earlier_ABB = np.broadcast_to(
            np.tri(self._size, dtype=bool), (len(is_own_AL), self._size, self._size)
        )
        return np.concatenate([contexts_ABL, earlier_ABB], axis=2)


class _WithMasks(NamedTuple):
    """Of a pass whose first tokens are pairs."""

    pairs: LayerAttention
    masks: LayerAttention
    num_pairs: int

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        queries, keys, values, rules = call[:4]
        found = []
        for attention, own in (
            (self.pairs, slice(self.num_pairs)),
            (self.masks, slice(self.num_pairs, None)),
        ):
            part = AttentionCall(queries[own], keys[own], values[own], rules)
            found.append(attention.attend(layer, part))
        return torch.cat(found)
