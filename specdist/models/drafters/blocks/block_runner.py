"""Runs a block drafter: one pass in a round's first step, and what it gave in the steps after.

Keys and values of contexts are made of the target's states as soon as these arrive; those of a block are kept
nowhere. A block begins at the first token that the target has not run, and tokens of it that are known stand
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

from specdist.models.attention.attention import (
    AttentionCall,
    AttentionRules,
    LayerAttention,
    attend_segments,
)
from specdist.models.cache.key_value import KeyValueCache
from specdist.models.drafters.blocks.block import BlockDrafter
from specdist.models.drafters.blocks.block_config import BLOCK
from specdist.models.drafters.runner import DrafterPass, DrafterRunner
from specdist.models.passes.flat import FlatBatch, similar_segments
from specdist.models.passes.torch_pass import NOT_ALLOCATED, PassOutputs
from specdist.sampling.uploads import upload

RULES = AttentionRules(scale=None, window=None, softcap=None)
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

    @torch.inference_mode()
    def run_blocks(self, blocks: Blocks, pages_SP: np.ndarray) -> tuple[Tensor, Tensor]:
        """The output states [A × B, E], and logits [A × B, v] of the draft's vocabulary."""
        assert self._cache is not None, NOT_ALLOCATED
        size = blocks.token_ids_AB.shape[1]
        (positions_N,) = upload(self._device, (blocks.starts_A[:, None] + np.arange(size)).ravel())
        attention = BlockAttention(self._cache, blocks, pages_SP, self._device)
        hidden_NE = self._hidden(blocks.token_ids_AB.flatten(), positions_N, attention)
        return hidden_NE, self._model.lm_head(hidden_NE)

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
        """The dry run."""
        del with_hidden
        hidden_NE = self._hidden(token_ids_T, positions_T, attention)[logits_index_N]
        logits_NV = self._model.after(self._model.lm_head(hidden_NE), hidden_NE, token_ids_T[logits_index_N])
        return PassOutputs(logits_NV, hidden_NE)

    def _hidden(self, token_ids_N: Tensor, positions_N: Tensor, attention: LayerAttention) -> Tensor:
        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attention.attend(layer, AttentionCall(queries, keys, values, RULES))

        return self._model.block(token_ids_N, positions_N, attend)


class BlockRunner(DrafterRunner):
    """Contexts have nothing to run beside their states.

    The rows of a round's blocks are kept until the next round: a step after a token takes that of its place.
    """

    model: BlockDrafter
    pass_class: type[DrafterPass] = BlockPass
    drafts_blocks = True

    def allocate(self, *, num_slots: int, **sizes: Any) -> None:
        super().allocate(num_slots=num_slots, **sizes)
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
        self._count_pass()

    def _run_blocks(self, blocks: Blocks, batch: FlatBatch) -> tuple[tuple[Tensor, Tensor], int]:
        """Output states and own logits of blocks that begin in a batch, and how many tokens were run."""
        del batch
        assert isinstance(self.torch_pass, BlockPass)
        return self.torch_pass.run_blocks(blocks, self.pages.pages), blocks.token_ids_AB.numel()


class _Group(NamedTuple):
    """Blocks whose contexts are padded to a common length.

    Attributes:
        tokens: of the blocks, among all; None if they are all.
        pages: of the contexts, block by block; ``foreign``: places in these, counted in tokens, beyond a
            context's end. What lies there was written by others, or never.
        bias: additive mask [A, 1, 1 or B, L + B]; None where every token sees every key.
    """

    tokens: Tensor | None
    num_blocks: int
    num_keys: int
    pages: Tensor
    foreign: Tensor
    bias: Tensor | None


class BlockAttention:
    """Every token of a block sees the context of its sequence, and the whole block."""

    def __init__(
        self, cache: KeyValueCache, blocks: Blocks, pages_SP: np.ndarray, device: torch.device
    ) -> None:
        self._cache, self._size = cache, blocks.token_ids_AB.shape[1]
        lengths_A, num_blocks = blocks.starts_A, len(blocks.starts_A)
        self._groups = []
        for members in similar_segments(np.full(num_blocks, self._size), np.maximum(lengths_A, 1)):
            own_A, num_keys = lengths_A[members], int(lengths_A[members].max())
            num_pages = -(-num_keys // cache.page_size)
            is_foreign = np.arange(num_pages * cache.page_size) >= own_A[:, None]
            tokens = (members[:, None] * self._size + np.arange(self._size)).ravel()
            pages, foreign, tokens_on_device = upload(
                device,
                pages_SP[blocks.slots_A[members], :num_pages].astype(np.int64).ravel(),
                np.flatnonzero(is_foreign),
                tokens,
            )
            seen = self._seen(~is_foreign[:, :num_keys])
            bias = None
            if seen is not None:
                bias = torch.where(torch.from_numpy(seen), 0.0, -torch.inf).to(cache.dtype).to(device)
                bias = bias[:, None]
            whole = len(members) == num_blocks
            self._groups.append(
                _Group(None if whole else tokens_on_device, len(members), num_keys, pages, foreign, bias)
            )

    def _seen(self, is_own_AL: np.ndarray) -> np.ndarray | None:
        """[A, 1 or B, L + B]: what a block's tokens see, of which these contexts' tokens are their own; None
        for all."""
        if is_own_AL.all():
            return None
        return np.pad(is_own_AL, ((0, 0), (0, self._size)), constant_values=True)[:, None]

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        heads, width = call.keys.shape[1:]
        output_NHD = torch.empty_like(call.queries_THD)
        for group in self._groups:
            own = call.queries_THD, call.keys, call.values
            queries, keys, values = own if group.tokens is None else (each[group.tokens] for each in own)
            contexts = (
                self._of_contexts(layer, group, heads, width, reads_values=reads_values)
                for reads_values in (False, True)
            )
            keys, values = (
                torch.cat([context, each.unflatten(0, (-1, self._size))], dim=1).transpose(1, 2)
                for context, each in zip(contexts, (keys, values), strict=True)
            )
            bias = group.bias
            if bias is not None:
                bias = bias.repeat(1, 1, call.num_repeats * self._size // bias.shape[2], 1)
            found = attend_segments(queries, keys, values, bias, call.rules)
            if group.tokens is None:
                return found
            output_NHD[group.tokens] = found
        return output_NHD

    def _of_contexts(
        self, layer: int, group: _Group, heads: int, width: int, *, reads_values: bool
    ) -> Tensor:
        """[A, L, G, D]: keys or values."""
        copied = self._cache.read(layer, group.pages, reads_values=reads_values)
        copied.view(-1, heads * width).index_fill_(0, group.foreign, 0.0)
        return copied.view(group.num_blocks, -1, heads, width)[:, : group.num_keys]
