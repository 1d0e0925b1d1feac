"""Drafters of the target's states, whatever their kind: loaded with their caches, and run by the same
function as every model; and their blocks, of which there is one pass in a round's first step.

T flat tokens of a batch, S numbers of the target's states of a token, side by side, A sequences, B tokens of
a block, M mask tokens of one, N tokens of a pass, E hidden size, v vocabulary of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.batch.flat import FlatBatch
from specdist.models.draft_models.block import BLOCK
from specdist.models.draft_models.declaration import Drafter, Placement
from specdist.models.draft_models.eagle3 import EAGLE3, PEAGLE, LlamaForCausalLMEagle3
from specdist.models.draft_models.mtp import MTP
from specdist.models.drafters.files import check_mtp, check_own_files, load_mtp, load_own_files
from specdist.models.drafters.passes import BlockPass, DrafterLayers, DrafterPass, Eagle3Layers, MtpLayers
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.uploads import upload

NO_LINE = -1


class Blocks(NamedTuple):
    """The blocks of these slots: the positions of their first tokens, and of every token of the batch the
    number of its block, or ``NO_LINE``, and its place in it, which is negative before the block."""

    slots_A: np.ndarray
    starts_A: np.ndarray
    lines_T: np.ndarray
    places_T: np.ndarray


class DraftBlocks:
    """The rows of a round's blocks are kept until the next round: a step after a token takes that of its
    place.

    A block drafter's block begins at the first token that the target has not run, and tokens of it that are
    known stand in their places: the next token, and what a constraint forces after it.

    P-EAGLE's pass is over what EAGLE-3 would run, and over mask tokens. Committed tokens are pairs with the
    states before them, whose keys and values are kept, up to the next token, from whose output the first
    token is drawn. The masks after it see it, all before it, and the masks before themselves; later pairs
    overwrite what they leave. Tokens that a constraint forces stay masks: no state is before them.

    Attributes:
        num_run: tokens of the pass that the last step has made; 0 if it needed none.
    """

    num_run = 0

    def __init__(self, runner: ModelRunner, *, has_masks: bool) -> None:
        """``has_masks``: masks come after pairs, as in P-EAGLE."""
        self._runner = runner
        # A drafter of blocks, or of P-EAGLE.
        self._model: Any = runner.model
        self._config = self._model.config
        self._layout = self._pairs_and_masks if has_masks else self._whole_blocks

    def allocate(
        self, *, num_pages: int, page_size: int, num_slots: int, max_seq_len: int, **sizes: Any
    ) -> dict[str, Any]:
        """The sizes of the runner's cache, for these without blocks."""
        size = self._config.block_size
        # A sequence may have no pages yet after that of a block's first token.
        own = num_slots, -(-(size - 1) // page_size)
        self._own_pages_SP = num_pages + np.arange(np.prod(own)).reshape(own)
        # The tokens of each slot whose states have arrived, and its block's line among those that are kept.
        self._num_states, self._lines = np.zeros(num_slots, np.int64), np.full(num_slots, NO_LINE)
        self._kept: tuple[Tensor, Tensor] | None = None
        return {
            "num_pages": num_pages + self._own_pages_SP.size,
            "page_size": page_size,
            "num_slots": num_slots,
            "max_seq_len": max_seq_len + size + page_size,
            **sizes,
        }

    def extend_contexts(self, slots_T: np.ndarray, positions_T: np.ndarray) -> None:
        """The states of these tokens have arrived."""
        # Positions ascend within a slot, so the last write is the largest.
        self._num_states[slots_T] = positions_T + 1

    def drop(self) -> None:
        """A round begins."""
        self._lines[:], self._kept = NO_LINE, None

    def assume_contexts(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        self.drop()
        self._num_states[slots] = lengths

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, asked_N: np.ndarray) -> Tensor:
        """[N, V]: logits after these tokens; with a pass only if they have no blocks yet."""
        self.num_run = 0
        slots_N, positions_N = batch.slots_T[asked_N], batch.positions_T[asked_N]
        if (self._lines[slots_N] == NO_LINE).any():
            self._run(batch, slots_N, positions_N)
        assert self._kept is not None
        index_N, asked_on_device_N = upload(self._runner.device, self._rows(slots_N, positions_N), asked_N)
        token_ids_N = torch.as_tensor(batch.token_ids_T, device=self._runner.device)[asked_on_device_N]
        hidden_NE, own_Nv = (each[index_N] for each in self._kept)
        logits_NV: Tensor = self._model.after(own_Nv, hidden_NE, token_ids_N)
        return logits_NV

    @torch.inference_mode()
    def confidences(
        self, batch: FlatBatch, logits_index: np.ndarray, top_of: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """float32 [A, P]: of every place of the blocks after these tokens, before any draw, how likely its
        likeliest token is, which ``top_of`` says of logits [A, V]; or what a confidence head estimates. Steps
        take their logits of the same blocks.

        DSpark's heads read the likeliest token in the place of the token before, which is not drawn.
        """
        slots_A, positions_A = batch.slots_T[logits_index], batch.positions_T[logits_index]
        self._run(batch, slots_A, positions_A)
        assert self._kept is not None
        most = int((positions_A - self._num_states[slots_A]).max()) + self._config.first_row
        rows_A, index_A = upload(self._runner.device, self._rows(slots_A, positions_A), logits_index)
        token_ids_A = torch.as_tensor(batch.token_ids_T, device=self._runner.device)[index_A]
        found = []
        for place in range(self._config.block_size - most):
            hidden_AE, own_Av = (each[rows_A + place] for each in self._kept)
            logits_AV = self._model.after(own_Av, hidden_AE, token_ids_A)
            estimates_A = self._model.estimates(hidden_AE, token_ids_A)
            found.append(top_of(logits_AV) if estimates_A is None else estimates_A)
            token_ids_A = logits_AV.argmax(dim=1)
        return torch.stack(found, dim=1)

    def _rows(self, slots_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
        """Which of the kept rows stand after tokens at these positions."""
        places_N = positions_N - self._num_states[slots_N]
        rows_N: np.ndarray = (
            self._lines[slots_N] * self._config.block_size + places_N + self._config.first_row
        )
        return rows_N

    def _run(self, batch: FlatBatch, slots_A: np.ndarray, positions_A: np.ndarray) -> None:
        """Blocks of these slots, in which tokens after these positions are to be drawn."""
        config, assumed_A = self._config, self._num_states[slots_A]
        places_A = positions_A - assumed_A
        # Rounds that are only timed bring no states.
        is_far_A = (places_A < 0) | (places_A >= config.block_size - config.first_row)
        self._num_states[slots_A] = starts_A = np.where(is_far_A, positions_A, assumed_A)
        self._lines[:] = NO_LINE
        self._lines[slots_A] = np.arange(len(slots_A))
        places_T = batch.positions_T - self._num_states[batch.slots_T]
        blocks = Blocks(slots_A, starts_A, self._lines[batch.slots_T], places_T)
        flat, asked_N = self._layout(blocks, batch)
        pages_AP, own_AP = self._runner.pages.pages[slots_A], self._own_pages_SP[slots_A]
        after_A1 = starts_A[:, None] // self._runner.cache.key_value.page_size + 1
        np.put_along_axis(pages_AP, after_A1 + np.arange(own_AP.shape[1]), own_AP, axis=1)
        rows = self._runner.forward_over(flat, pages_AP, asked_N)
        hidden_NE, own_Nv = rows.split((config.hidden_size, len(self._model.d2t)), dim=-1)
        self._kept, self.num_run = (hidden_NE, own_Nv), len(flat)

    def _whole_blocks(self, blocks: Blocks, batch: FlatBatch) -> tuple[FlatBatch, np.ndarray]:
        """What a pass runs, whose slots are the blocks' numbers, and the tokens whose rows are asked for: all
        tokens of all blocks."""
        size, device, num_blocks = self._config.block_size, self._runner.device, len(blocks.slots_A)
        lines_T, places_T = blocks.lines_T, blocks.places_T
        known = np.flatnonzero((lines_T != NO_LINE) & (places_T >= 0) & (places_T < size))
        index, known_on_device = upload(device, lines_T[known] * size + places_T[known], known)
        token_ids_N = torch.full((num_blocks * size,), self._config.mask_token_id, device=device)
        token_ids_N[index] = torch.as_tensor(batch.token_ids_T, device=device)[known_on_device].long()
        positions_AB = blocks.starts_A[:, None] + np.arange(size)
        flat = FlatBatch(token_ids_N, np.arange(num_blocks).repeat(size), positions_AB.ravel())
        return flat, np.arange(len(flat))

    def _pairs_and_masks(self, blocks: Blocks, batch: FlatBatch) -> tuple[FlatBatch, np.ndarray]:
        """What :meth:`_whole_blocks` gives: the pairs of the batch, and the masks after them, of which are
        asked for the next tokens and the masks."""
        device, num_blocks = self._runner.device, len(blocks.slots_A)
        kept = np.flatnonzero(blocks.places_T <= 0)
        next_A = kept[blocks.places_T[kept] == 0]
        assert (batch.slots_T[next_A] == blocks.slots_A).all(), (
            "a next token of each sequence, in their order"
        )
        num_masks = self._config.block_size - 1
        after_AM = blocks.starts_A[:, None] + 1 + np.arange(num_masks)
        lines_N = np.append(blocks.lines_T[kept], np.arange(num_blocks).repeat(num_masks))
        positions_N = np.append(batch.positions_T[kept], after_AM.ravel())
        order_N = np.lexsort((positions_N, lines_N))
        kept_on_device, order_on_device_N = upload(device, kept, order_N)
        token_ids_T = torch.as_tensor(batch.token_ids_T, device=device)[kept_on_device]
        masks = token_ids_T.new_full((after_AM.size,), self._config.mask_token_id)
        flat = FlatBatch(
            torch.cat([token_ids_T, masks])[order_on_device_N],
            lines_N[order_N],
            positions_N[order_N],
            is_mask_T=order_N >= len(kept),
        )
        return flat, np.flatnonzero(flat.positions_T >= blocks.starts_A[flat.slots_T])


class DrafterRunner(ModelRunner):
    """Contexts, of which no logits are wanted, wait for the target's states; of a drafter that keeps none of
    these beside keys and values, there is nothing to run of a context."""

    blocks: DraftBlocks | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        kind: Drafter,
        on_pass: Callable[[], None] | None = None,
        has_float8_cache: bool = False,
    ) -> None:
        self._num_kept, self._waiting = kind.num_kept_numbers(model.config), list[FlatBatch]()
        make_pass: Callable[..., DrafterPass | BlockPass] = BlockPass
        if self._num_kept:
            layers: DrafterLayers = MtpLayers(model)
            if isinstance(model, LlamaForCausalLMEagle3):
                layers = Eagle3Layers(model)
            make_pass = partial(DrafterPass, layers=layers, num_kept=self._num_kept)
        super().__init__(
            model,
            device,
            Acceleration.of(device, has_float8_cache=has_float8_cache),
            model_impl="transformers",
            on_pass=on_pass,
            make_pass=make_pass,
        )
        if self._num_kept:
            self._shapes.hide_first()
        if kind.drafts_blocks:
            self.blocks = DraftBlocks(self, has_masks=bool(self._num_kept))

    def allocate(self, **sizes: Any) -> None:
        if self.blocks is None:
            super().allocate(**sizes)
            return
        super().allocate(**self.blocks.allocate(**sizes))
        self.runs = None

    def receive(self, slots_T: np.ndarray, positions_T: np.ndarray, states_TS: Tensor) -> None:
        """The target's states after these tokens. The page table must be that of the pass that they are from.
        Then run the contexts of that pass."""
        assert isinstance(self.torch_pass, DrafterPass | BlockPass)
        self.torch_pass.receive(FlatBatch(slots_T, slots_T, positions_T), self.pages.pages, states_TS)
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            # The lengths hardly come again: the pass is not recorded.
            self._ragged(self._for_layers(batch), self.pages.pages, np.zeros(0, np.int64), False)
        if self.blocks is not None:
            self.blocks.extend_contexts(slots_T, positions_T)

    def drop_waiting(self) -> None:
        """A round begins; contexts that still wait are of a pass that has failed."""
        self._waiting = []
        if self.blocks is not None:
            self.blocks.drop()

    def assume_contexts(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        super().assume_contexts(slots, lengths)
        if self.blocks is not None:
            self.blocks.assume_contexts(slots, lengths)

    def num_run(self, batch: FlatBatch) -> int:
        return len(batch) if self.blocks is None else self.blocks.num_run

    def forward(self, batch: FlatBatch, logits_index: Any) -> Tensor:
        if len(logits_index):
            if self.blocks is not None:
                return self.blocks.forward(batch, np.asarray(logits_index, np.int64))
            return super().forward(batch, logits_index)
        if self._num_kept:
            self._waiting.append(batch)
        return torch.empty(0, self.model.config.get_text_config().vocab_size, device=self.device)


class _Loading(NamedTuple):
    check: Callable[[Checkpoint, Checkpoint], None]
    load: Callable[[Checkpoint, Checkpoint, Placement], PreTrainedModel]


LOADINGS: dict[Drafter, _Loading] = {
    EAGLE3: _Loading(check_own_files, load_own_files),
    PEAGLE: _Loading(check_own_files, load_own_files),
    MTP: _Loading(check_mtp, load_mtp),
    BLOCK: _Loading(check_own_files, load_own_files),
}


def check_drafter(draft: Checkpoint, target: Checkpoint) -> None:
    """Compare the drafter with its target, and with the headers of its files.

    Raises :class:`UserError` for one of another target, or of a form that is not read here.
    """
    assert draft.drafter is not None
    LOADINGS[draft.drafter].check(draft, target)


def load_drafter(
    draft: Checkpoint, target: Checkpoint, placement: Placement, on_pass: Callable[[], None] | None = None
) -> DrafterRunner:
    """Raises :class:`UserError` if files have changed since they were checked."""
    assert draft.drafter is not None
    model = LOADINGS[draft.drafter].load(draft, target, placement)
    return DrafterRunner(model, placement.device, draft.drafter, on_pass, draft.has_float8_cache)
