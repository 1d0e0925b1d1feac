"""A drafter of the target's states with its cache, run by the same function as every model.

T flat tokens, S numbers of the target's states of a token, side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.batch.flat import FlatBatch
from specdist.models.draft_models.declaration import Drafter
from specdist.models.draft_models.eagle3 import LlamaForCausalLMEagle3
from specdist.models.drafters.blocks import DraftBlocks
from specdist.models.drafters.passes import BlockPass, DrafterLayers, DrafterPass, Eagle3Layers, MtpLayers
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner


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
        self.receiver = self

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
