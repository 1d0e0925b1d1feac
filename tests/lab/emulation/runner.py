"""A model's runner without the model: the Markov table's logits, ready when the planner's time has gone by.

What the engine does for a real one is done for this one: pages, branches, flat batches. What a device would
do is not: there is no cache, since the table needs none.

T flat tokens, N tokens whose logits are wanted, S segments; of a draft's run A sequences, D steps, C columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdist.data.stats.regression import NS_PER_S
from specdist.lab.plan.roofline import Placement
from specdist.models.batch.flat import FlatBatch, Segments
from specdist.models.cache.key_value import BranchPageTable
from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.prefix_states import NO_ROLLBACK, Rollback
from specdist.models.passes.static_runs import DraftedRun
from specdist.sampling.branch_estimates import DraftDraws
from specdist.sampling.distributions import NextDraws, with_next_tokens
from specdist.sampling.random import Purpose, RandomKeys, uniforms
from tests.lab.emulation.device import EmulatedDevice
from tests.lab.emulation.markov import MarkovModel

# The planner is asked for mean context lengths that are multiples of this, so that its answers can be kept.
CONTEXT_STEP = 16


class Pace:
    """The planner's time for a pass, at the mean context length of its sequences."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._known_ns = functools.cache(self._pass_ns)

    def pass_ns(
        self, num_tokens: int, num_rows: int, context_tokens: float, num_logits: int | None = None
    ) -> int:
        """Nanoseconds of a pass of ``num_tokens`` of ``num_rows`` sequences, with sampling from the logits of
        so many of them, by default of all."""
        context_tokens = round(context_tokens / CONTEXT_STEP) * CONTEXT_STEP
        return self._known_ns(num_tokens, num_rows, context_tokens, num_logits)

    def _pass_ns(self, num_tokens: int, num_rows: int, context_tokens: int, num_logits: int | None) -> int:
        placement = dataclasses.replace(self._placement, context_tokens=context_tokens)
        return round(placement.pass_s(num_tokens, num_rows, num_logits) * NS_PER_S)


class EmulatedRunner:
    """What the engine uses of a :class:`specdist.models.passes.runner.ModelRunner`.

    Passes take no time until ``num_full`` slots have run as many tokens as a prompt has: a batch is filled at
    no cost, and what is measured is its steady state.
    """

    device = torch.device("cpu")
    is_asynchronous = True
    keeps_states = False
    head = reader = None

    def __init__(self, model: MarkovModel, pace: Pace, device: EmulatedDevice) -> None:
        self.model = model
        self.cache = self  # of branches
        self.pace = pace
        self._queue = device
        self._num_missing, self._prompt_tokens = 0, 0
        self._is_full_R = np.zeros(0, bool)
        self.runs: Any = EmulatedRuns(self, device)

    @property
    def is_full(self) -> bool:
        """Passes take their time."""
        return self._num_missing <= 0

    def fill(self, num_full: int, prompt_tokens: int) -> None:
        """From now on passes take no time, until so many slots have run a prompt of this length."""
        self._num_missing, self._prompt_tokens = num_full, prompt_tokens
        self._is_full_R = np.zeros(len(self._table.pages), bool)

    def allocate(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_seq_len: int,
        num_branch_slots: int = 0,
        max_branch_tokens: int = 0,
        windowed: None = None,
        rollback: Rollback = NO_ROLLBACK,
        num_prefix_states: int = 0,
    ) -> None:
        self._table = BranchPageTable(
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=max_seq_len,
            num_branch_slots=num_branch_slots,
            max_branch_tokens=max_branch_tokens,
        )

    def assume_contexts(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """There are no states."""

    def update_pages(self, updates: PageUpdates) -> None:
        self._table.update(updates)

    @property
    def pages(self) -> BranchPageTable:
        return self._table

    def open_branches(self, slots_B: np.ndarray, branches_B: np.ndarray, positions_B: np.ndarray) -> None:
        self._table.open(slots_B, branches_B, positions_B)

    def adopt_branches(
        self, branches_B: np.ndarray, slots_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> None:
        self._table.adopt(branches_B, slots_B, begins_B, lengths_B)

    def num_run(self, batch: FlatBatch) -> int:
        return len(batch)

    def forward(self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
        """Logits [N, V], which are there once the pass is over."""
        segments = Segments.of(batch)
        self._queue.queue(self.pass_ns(segments, len(batch), len(logits_index)))
        if not self.is_full:
            self._note_prompts(batch, segments)
        return self._queue.tensor(self.model.logits(last_ids(batch, logits_index)))

    def pass_ns(self, segments: Segments, num_tokens: int, num_logits: int) -> int:
        """Nanoseconds of a pass, with sampling."""
        if not self.is_full:
            return 0
        num_keys = float(segments.num_keys_S.mean())
        return self.pace.pass_ns(num_tokens, len(segments.starts_S), num_keys, num_logits)

    def _note_prompts(self, batch: FlatBatch, segments: Segments) -> None:
        slots_S = batch.slots_T[segments.starts_S][segments.num_keys_S >= self._prompt_tokens]
        self._num_missing -= int((~self._is_full_R[slots_S]).sum())
        self._is_full_R[slots_S] = True


class EmulatedRuns:
    """What the draft uses of :class:`specdist.models.passes.static_runs.StaticRuns`: on a GPU the steps of a
    run are one graph, which the host replays at once."""

    def __init__(self, runner: EmulatedRunner, device: EmulatedDevice) -> None:
        self._runner = runner
        self._queue = device

    def run(
        self,
        batch: FlatBatch,
        num_steps_A: np.ndarray,
        keys: RandomKeys,
        draws: DraftDraws,
        features_3A: Tensor | None = None,
        next_draws: NextDraws | None = None,
    ) -> DraftedRun:
        """See :meth:`StaticRuns.run`. A recorded step takes the time of all sequences of the first."""
        del features_3A
        segments, num_steps, num_rows = Segments.of(batch), int(num_steps_A.max()), len(num_steps_A)
        step_ns = self._runner.pass_ns(segments, num_rows, num_rows)
        duration_ns = self._runner.pass_ns(segments, len(batch), num_rows) + (num_steps - 1) * step_ns
        self._queue.queue(duration_ns)
        model = self._runner.model
        ids_A = last_ids(batch, segments.starts_S + segments.lengths_S - 1)
        if next_draws is not None:
            ids_A = with_next_tokens(ids_A, next_draws.token_ids_W.as_subclass(Tensor))
        stream_keys_A = torch.from_numpy(keys.stream_keys_N)
        positions_DA = torch.from_numpy(keys.positions_N) + torch.arange(num_steps)[:, None]
        misses_A = torch.from_numpy(keys.num_misses_N)
        uniforms_DA = None
        if draws.settings.is_random:
            uniforms_DA = uniforms(stream_keys_A, positions_DA, misses_A, Purpose.DRAFT)
        columns: list[Tensor] = []
        scores: list[Tensor] = []
        for step in range(num_steps):
            uniforms_A = None if uniforms_DA is None else uniforms_DA[step]
            drawn = draws.draw(model.logits(ids_A), stream_keys_A, positions_DA[step], uniforms_A)
            ids_A = drawn.token_ids_N
            columns += [ids_A.double(), drawn.probabilities_N]
            columns += [] if drawn.features_3N is None else drawn.features_3N.double().unbind()
            scores.append(drawn.scores_NV)
        columns_DCA = torch.stack(columns).view(num_steps, -1, num_rows)
        return DraftedRun(self._queue.tensor(columns_DCA), self._queue.tensor(torch.stack(scores)))


def last_ids(batch: FlatBatch, index: Sequence[int] | np.ndarray) -> Tensor:
    """[N]: the tokens at these places, which the device knows: nobody waits for it."""
    token_ids_T = batch.token_ids_T
    if isinstance(token_ids_T, np.ndarray):
        token_ids_T = torch.from_numpy(token_ids_T)
    return token_ids_T.as_subclass(Tensor)[torch.as_tensor(index, dtype=torch.int64)]
