"""Runs a block drafter: one pass in a round's first step, and what it gave in the steps after.

Keys and values of contexts are made of the target's states as soon as these arrive, and overwrite those of a
block. A block begins at the first token that the target has not run, and tokens of it that are known stand
in their places: the next token, and what a constraint forces after it.

A sequences, B tokens of a block, T flat tokens, N tokens whose logits are wanted, L tokens of a context, E
hidden size, S numbers of the target's states, v vocabulary of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionCall, AttentionRules, LayerAttention
from specdist.models.batch.flat import FlatBatch, PassOutputs
from specdist.models.draft_models.block import BlockDrafter
from specdist.models.draft_models.block_config import BLOCK
from specdist.models.drafters.runner import DrafterPass, DrafterRunner
from specdist.models.passes.torch_pass import NOT_ALLOCATED, TorchPass
from specdist.sampling.uploads import upload

# Every token of a block sees the context of its sequence, and the whole block.
RULES = AttentionRules(scale=None, window=None, softcap=None, is_causal=False)
NO_LINE = -1


class Blocks(NamedTuple):
    """Of which slots, the positions of their first tokens, and the tokens [A, B], on the device."""

    slots_A: np.ndarray
    starts_A: np.ndarray
    token_ids_AB: Tensor


class BlockPass(DrafterPass):
    """A pass over whole blocks."""

    kind = BLOCK
    _model: BlockDrafter

    @torch.inference_mode()
    def receive(self, batch: FlatBatch, pages: np.ndarray, states_TS: Tensor) -> None:
        assert self._cache is not None, NOT_ALLOCATED
        places_T, (positions_T,) = self.places(batch, pages), upload(self._device, batch.positions_T)
        own_TS = states_TS.to(device=self._device, dtype=self._cache.dtype)
        for layer, (keys, values) in enumerate(self._model.contexts(own_TS, positions_T)):
            self._cache.write(layer, places_T, keys, values)

    run = TorchPass.run

    @torch.inference_mode()
    def compute(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        logits_index_N: Tensor,
        attention: LayerAttention,
        *,
        with_hidden: bool = False,
    ) -> PassOutputs:
        """In the place of logits, output states beside logits of the draft's vocabulary: [N, E + v]."""
        del with_hidden

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attention.attend(layer, AttentionCall(queries, keys, values, RULES))

        with self.fused():
            hidden_NE = self._model.block(token_ids_T, positions_T, attend)[logits_index_N]
        return PassOutputs(torch.cat([hidden_NE, self._model.lm_head(hidden_NE)], dim=-1), None)


class BlockRunner(DrafterRunner):
    """Contexts have nothing to run beside their states.

    The rows of a round's blocks are kept until the next round: a step after a token takes that of its place.
    """

    model: BlockDrafter
    pass_class: type[DrafterPass] = BlockPass
    drafts_blocks = True

    def allocate(
        self, *, num_pages: int, page_size: int, num_slots: int, max_seq_len: int, **sizes: Any
    ) -> None:
        size = self.model.config.block_size
        # A sequence may have no pages yet after that of a block's first token.
        own = num_slots, -(-(size - 1) // page_size)
        self._own_pages_SP = num_pages + np.arange(np.prod(own)).reshape(own)
        super().allocate(
            num_pages=num_pages + self._own_pages_SP.size,
            page_size=page_size,
            num_slots=num_slots,
            max_seq_len=max_seq_len + size + page_size,
            **sizes,
        )
        self.runs = None
        # By slot: tokens whose states have arrived, and the block's line among those that are kept.
        self._num_states, self._lines = np.zeros(num_slots, np.int64), np.full(num_slots, NO_LINE)
        self._kept: tuple[Tensor, Tensor] | None = None
        self._num_run = 0

    def num_run(self, batch: FlatBatch) -> int:
        return self._num_run

    def receive(self, slots_T: np.ndarray, positions_T: np.ndarray, states_TS: Tensor) -> None:
        super().receive(slots_T, positions_T, states_TS)
        # Positions ascend within a slot, so the last write is the largest.
        self._num_states[slots_T] = positions_T + 1

    def drop_waiting(self) -> None:
        """A round begins."""
        super().drop_waiting()
        self._lines[:], self._kept = NO_LINE, None

    def assume_contexts(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        self.drop_waiting()
        self._num_states[slots] = lengths

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, logits_index: Any) -> Tensor:
        asked_N = np.asarray(logits_index, np.int64)
        if not len(asked_N):
            return torch.empty(0, self.model.config.vocab_size, device=self.device)
        self._num_run = 0
        slots_N, positions_N = batch.slots_T[asked_N], batch.positions_T[asked_N]
        if (self._lines[slots_N] == NO_LINE).any():
            self._run(batch, slots_N, positions_N)
        assert self._kept is not None
        size, places_N = self.model.config.block_size, positions_N - self._num_states[slots_N]
        rows_N = self._lines[slots_N] * size + places_N + self.model.config.first_row
        index_N, asked_on_device_N = upload(self.device, rows_N, asked_N)
        token_ids_N = torch.as_tensor(batch.token_ids_T, device=self.device)[asked_on_device_N]
        hidden_NE, own_Nv = (each[index_N] for each in self._kept)
        return self.model.after(own_Nv, hidden_NE, token_ids_N)

    @torch.inference_mode()
    def confidences(
        self, batch: FlatBatch, logits_index: np.ndarray, top_of: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """float32 [A, P]: of every place of the blocks after these tokens, before any draw, how likely
        its likeliest token is, which ``top_of`` says of logits [A, V]; or what a confidence head estimates.
        DSpark's heads read the likeliest token in the place of the token before, which is not drawn. Steps
        take their logits of the same blocks."""
        slots_A, positions_A = batch.slots_T[logits_index], batch.positions_T[logits_index]
        self._run(batch, slots_A, positions_A)
        assert self._kept is not None
        size, first_A = self.model.config.block_size, positions_A - self._num_states[slots_A]
        first_A = first_A + self.model.config.first_row
        rows_A, index_A = upload(self.device, self._lines[slots_A] * size + first_A, logits_index)
        token_ids_A = torch.as_tensor(batch.token_ids_T, device=self.device)[index_A]
        found = []
        for place in range(size - int(first_A.max())):
            hidden_AE, own_Av = (each[rows_A + place] for each in self._kept)
            logits_AV = self.model.after(own_Av, hidden_AE, token_ids_A)
            estimates_A = self.model.estimates(hidden_AE, token_ids_A)
            found.append(top_of(logits_AV) if estimates_A is None else estimates_A)
            token_ids_A = logits_AV.argmax(dim=1)
        return torch.stack(found, dim=1)

    def _run(self, batch: FlatBatch, slots_A: np.ndarray, positions_A: np.ndarray) -> None:
        """Blocks of these slots, in which tokens after these positions are to be drawn."""
        config, assumed_A = self.model.config, self._num_states[slots_A]
        size, places_A = config.block_size, positions_A - assumed_A
        # Rounds that are only timed bring no states.
        is_far_A = (places_A < 0) | (places_A >= size - config.first_row)
        self._num_states[slots_A] = starts_A = np.where(is_far_A, positions_A, assumed_A)
        self._lines[:] = NO_LINE
        self._lines[slots_A] = np.arange(len(slots_A))
        lines_T, places_T = self._lines[batch.slots_T], batch.positions_T - self._num_states[batch.slots_T]
        known = np.flatnonzero((lines_T != NO_LINE) & (places_T >= 0) & (places_T < size))
        index, known_on_device = upload(self.device, lines_T[known] * size + places_T[known], known)
        token_ids_N = torch.full((len(slots_A) * size,), config.mask_token_id, device=self.device)
        token_ids_N[index] = torch.as_tensor(batch.token_ids_T, device=self.device)[known_on_device].long()
        blocks = Blocks(slots_A, starts_A, token_ids_N.view(-1, size))
        self._kept, self._num_run = self._run_blocks(blocks, batch)

    def _run_blocks(self, blocks: Blocks, batch: FlatBatch) -> tuple[tuple[Tensor, Tensor], int]:
        """Output states and own logits of blocks that begin in a batch, and how many tokens were run."""
        del batch
        num_blocks, size = blocks.token_ids_AB.shape
        positions_AB = blocks.starts_A[:, None] + np.arange(size)
        lines_N = np.arange(num_blocks).repeat(size)
        flat = FlatBatch(blocks.token_ids_AB.flatten(), lines_N, positions_AB.ravel())
        return self._rows(blocks, flat, np.arange(len(flat))), len(flat)

    def _rows(self, blocks: Blocks, flat: FlatBatch, asked_N: np.ndarray) -> tuple[Tensor, Tensor]:
        """Of the tokens that are asked for, in a pass whose slots are the blocks' numbers."""
        assert self._cache is not None, NOT_ALLOCATED
        pages_AP, own_AP = self.pages.pages[blocks.slots_A], self._own_pages_SP[blocks.slots_A]
        after_A1 = blocks.starts_A[:, None] // self._cache.page_size + 1
        np.put_along_axis(pages_AP, after_A1 + np.arange(own_AP.shape[1]), own_AP, axis=1)
        rows = self._recorded(flat, pages_AP, asked_N)
        if rows is None:
            rows = self.forward_seen(flat, pages_AP, asked_N)
        hidden_NE, own_Nv = rows.split((self.model.config.hidden_size, len(self.model.d2t)), dim=-1)
        return hidden_NE, own_Nv
