"""Drafters of the target's states in the emulation: their passes, and the states' way, without the states.

A drafter takes turns with its target. What contexts take waits for the states of their pass, as they do: it
is added where the next round begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from specdist.data.stats.regression import NS_PER_S
from specdist.lab.plan.roofline import Placement
from specdist.models.batch.flat import FlatBatch, Segments
from tests.lab.emulation.device import EmulatedDevice
from tests.lab.emulation.markov import MarkovModel
from tests.lab.emulation.runner import EmulatedRunner, Pace, last_ids


class EmulatedDrafter(EmulatedRunner):
    """Its passes take turns with those of the target.

    ``block_tokens``: of the pass that is the only one of a round; 0 of a drafter that goes token by token.
    ``state_ns``: that a token's states are on their way.
    """

    def __init__(
        self, model: MarkovModel, pace: Pace, device: EmulatedDevice, *, block_tokens: int, state_ns: float
    ) -> None:
        super().__init__(model, pace, device)
        self.runs, self.receiver = None, self
        self._block_tokens, self._state_ns = block_tokens, state_ns
        self.blocks = self if block_tokens else None
        self._begins, self._num_run, self._waiting_ns = True, 0, 0

    def num_run(self, batch: FlatBatch) -> int:
        return self._num_run

    def receive(self, slots_T: np.ndarray, positions_T: np.ndarray, states_TS: Tensor) -> None:
        """The draws of the Markov pair need none."""

    def drop_waiting(self) -> None:
        """A round begins."""
        self._queue.queue(self._waiting_ns)
        self._begins, self._waiting_ns = True, 0

    def forward(self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
        segments, num_rows = Segments.of(batch), len(logits_index)
        if not num_rows:
            if self.is_full:
                self._waiting_ns += self._states_ns(len(batch)) + self._contexts_ns(batch, segments)
            else:
                self._note_prompts(batch, segments)
            return self._queue.tensor(self.model.logits(last_ids(batch, [])))
        self._queue.queue(self._step_ns(batch, segments, num_rows))
        self._begins = False
        with self._queue.standing_in():
            return self._queue.tensor(self.model.logits(last_ids(batch, logits_index)))

    def confidences(
        self, batch: FlatBatch, logits_index: np.ndarray, top_of: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """float32 [A, P]: see :class:`specdist.models.passes.runner.BlockForwards`."""
        self._queue.queue(self._block_ns(batch, Segments.of(batch), len(logits_index)))
        with self._queue.standing_in():
            token_ids_A, found = last_ids(batch, logits_index), []
            for _ in range(self._block_tokens - 1):
                logits_AV = self.model.logits(token_ids_A)
                found.append(top_of(logits_AV))
                token_ids_A = logits_AV.argmax(dim=1)
            return self._queue.tensor(torch.stack(found, dim=1))

    def _contexts_ns(self, batch: FlatBatch, segments: Segments) -> int:
        if self._block_tokens:
            return self.pace.contexts_ns(len(batch))
        return self.pass_ns(segments, len(batch), 0)

    def _step_ns(self, batch: FlatBatch, segments: Segments, num_rows: int) -> int:
        if not self.is_full:
            return 0
        if self.blocks is not None:
            self._num_run, drawing_ns = 0, self.pace.drawing_ns(num_rows)
            return drawing_ns + (self._block_ns(batch, segments, num_rows) if self._begins else 0)
        self._num_run = len(batch)
        states_ns = self._states_ns(len(batch)) if self._begins else 0
        return states_ns + self.pass_ns(segments, len(batch), num_rows)

    def _block_ns(self, batch: FlatBatch, segments: Segments, num_rows: int) -> int:
        """Of the pass over whole blocks, from which all steps of a round draw."""
        self._begins, self._num_run = False, num_rows * self._block_tokens
        if not self.is_full:
            return 0
        arrived_ns = self._states_ns(len(batch)) + self.pace.contexts_ns(len(batch))
        return arrived_ns + self.pass_ns(segments, self._num_run, 0)

    def _states_ns(self, num_tokens: int) -> int:
        return round(num_tokens * self._state_ns)


def draft_runner(
    target: Placement, draft: Placement, model: MarkovModel, device: EmulatedDevice, *, has_own_gpu: bool
) -> EmulatedRunner:
    """Of a draft, with a GPU of its own or on that of its target."""
    size, pace = draft.model, Pace(draft)
    if not size.num_read_numbers:
        return EmulatedRunner(model, pace, device)
    state_s = target.gpu.send_s(size.num_read_numbers * target.model.bytes_per_number)
    return EmulatedDrafter(
        model, pace, device, block_tokens=block_tokens(draft), state_ns=has_own_gpu * state_s * NS_PER_S
    )


def block_tokens(draft: Placement) -> int:
    """Tokens of a block's pass; 0 of another draft."""
    num_drafted = draft.model.num_block_tokens
    return num_drafted + 1 if num_drafted else 0
