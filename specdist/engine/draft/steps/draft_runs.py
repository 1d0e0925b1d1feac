"""Runs of draft steps: launched together, and collected when the device has taken all of them.

A step is a pass and a draw. The steps of a run are replayed as one, where
:mod:`specdist.models.passes.static_runs` has recorded runs of their number or of parts of it; else they are
launched one by one.

Next tokens that are drawn by chance stay on the device, too, until the first run is over. A sequence that
ends with its next token has taken part in that run for nothing.

R draft slots to draft for, A of them that a step draws for, W next tokens, D steps, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specdist.engine.draft.steps.draft_features import Places
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.draft.steps.draft_steps import Drafting, DrawnTokens, LaunchedSteps, Step, taking_part
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.engine.times.reports import PassCounts
from specdist.models.batch.flat import FlatBatch
from specdist.models.drafters.runner import DrafterRunner
from specdist.models.passes.runner import ModelRunner
from specdist.models.passes.static_runs import LONGEST_RUN, RECORDED_LENGTHS
from specdist.sampling.branch_estimates import DraftDraws
from specdist.sampling.distributions import NextDraws, SamplingSettings, with_next_tokens
from specdist.sampling.random import Purpose
from specdist.sampling.uploads import upload

# What a drafting still counts after each further one.
MEMORY = 0.9


class DraftRuns:
    """Gives a draft loop's steps to its model's device. What depends on a policy is decided elsewhere."""

    def __init__(
        self,
        runner: ModelRunner,
        draft_state: DraftState,
        pipeline: LogitsPipeline | None,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        keeps_scores: bool,
        keeps_features: bool,
        max_draft_tokens: int,
    ) -> None:
        """``keeps_scores``: where draws are not random, too."""
        runner.reuses_logits = False  # they may be kept
        self._runner, self._draft_state, self._pipeline = runner, draft_state, pipeline
        head = self.head = runner.head
        self.blocks = runner.blocks if isinstance(runner, DrafterRunner) else None
        self._draws = DraftDraws(
            settings=settings,
            vocab_size=vocab_size,
            keeps_scores=keeps_scores or settings.is_random,
            keeps_features=keeps_features
            or (head is not None and (head.takes_features or head.reads_drawing_state)),
        )
        draft_state.features.are_kept = self._draws.keeps_features
        self.pass_counts = PassCounts()
        self.pending: NextDraws | None = None
        # The longest recorded run of at most so many steps, by number of steps.
        lengths = {*RECORDED_LENGTHS, max_draft_tokens}
        self._recorded_lengths = [
            max((length for length in lengths if length <= number), default=1)
            for number in range(LONGEST_RUN + 1)
        ]

    def confidences(self, drafting: Drafting, active_A: np.ndarray) -> np.ndarray:
        """[A, B]: run the blocks of these, from which steps will draw, and wait for what is known of every
        place before any draw: see :class:`specdist.models.drafters.runner.DraftBlocks`."""
        batch, index_A, _ = self._inputs(drafting.places(active_A, 0), None)
        assert self.blocks is not None
        found_AB = self.blocks.confidences(batch, index_A, self._draws.top_probabilities)
        self.pass_counts.count(self._runner.num_run(batch), 0)
        on_host: np.ndarray = found_AB.double().cpu().numpy()
        return on_host

    def launch(self, drafting: Drafting, active_indices: list[np.ndarray]) -> list[LaunchedSteps]:
        """Launch steps; ``active_indices``: of each, the indices of those that it draws for."""
        launched: list[LaunchedSteps] = []
        first = drafting.num_steps
        while active_indices:
            if len(active_indices[0]) < len(drafting.active_A):
                keep_A = np.isin(drafting.active_A, active_indices[0], assume_unique=True)
                drafting.active_A = active_indices[0]
                drafting.last_step = drafting.last_step and drafting.last_step.select(keep_A)
            length = self._recorded_lengths[min(len(active_indices), LONGEST_RUN)]
            run = self._replay(drafting, first, active_indices[:length])
            if run is None:
                run = LaunchedSteps.of(self._step(drafting, first, active_indices[0]), first)
            launched.append(run)
            first += len(run.active_indices)
            del active_indices[: len(run.active_indices)]
        return launched

    def _replay(
        self, drafting: Drafting, depth: int, active_indices: list[np.ndarray]
    ) -> LaunchedSteps | None:
        """Replay steps, whose sequences are among those of the first; None if they cannot be recorded."""
        if self._runner.runs is None or self._pipeline is not None:
            return None
        active_A = active_indices[0]
        places = drafting.places(active_A, depth)
        first, _, features_3A = self._inputs(places, drafting.last_step)
        takes_part_DA = taking_part(active_indices)
        keys = self._draft_state.random_keys(*places)
        pending = self.pending if drafting.last_step is None else None
        self._draft_state.scores.own()
        run = self._runner.runs.run(first, takes_part_DA.sum(axis=0), keys, self._draws, features_3A, pending)
        if run is None:
            return None
        launched = LaunchedSteps(run.columns_DCA, depth, active_indices)
        for step, each_A in enumerate(active_indices):
            self.pass_counts.count(len(each_A) if step else len(first), len(each_A))
        steps_T, lines_T = np.nonzero(takes_part_DA)
        places_T = drafting.places(active_A[lines_T], depth + steps_T)
        self._note(places_T, run.scores_DSV.flatten(0, 1), steps_T * run.scores_DSV.shape[1] + lines_T)
        drafting.last_step = launched.last
        return launched

    def _step(self, drafting: Drafting, depth: int, active_A: np.ndarray) -> Step:
        """Give the device a step."""
        places = drafting.places(active_A, depth)
        batch, index_A, features_3A = self._inputs(places, drafting.last_step)
        if self.pending is not None and drafting.last_step is None:
            (ids_T,) = upload(self._runner.device, batch.token_ids_T)
            batch = replace(batch, token_ids_T=with_next_tokens(ids_T, self.pending.token_ids_W))
        estimates_A = None
        if self.head is None:
            logits_AV = self._runner.forward(batch, index_A)
        else:
            logits_AV, estimates_A = self._runner.forward_with_estimates(batch, index_A, features_3A)
        self.pass_counts.count(self._runner.num_run(batch), len(index_A))
        stream_keys_A = torch.from_numpy(self._draft_state.stream_keys[places[0]])
        filters = None
        if self._pipeline is not None:
            logits_AV, filters = self._pipeline.process_drafted(logits_AV, places)
        uniforms_A = self._uniforms(drafting, active_A, places)
        drawn = self._draws.draw(logits_AV, stream_keys_A, torch.from_numpy(places[1]), uniforms_A, filters)
        self._note(places, drawn.scores_NV, np.arange(len(active_A)))
        step = Step(active_A, *drawn[:3])
        if self.head is not None and estimates_A is not None:
            if self.head.reads_drawing_state:
                assert step.features_3A is not None
                estimates_A = self.head.estimates_of_draws(estimates_A, step.features_3A)
            step = step._replace(estimates_A=estimates_A)
        drafting.last_step = step
        return step

    def _note(self, places_T: Places, scores_MV: Tensor, lines_T: np.ndarray) -> None:
        """What steps have run, and drawn from at these places."""
        # Tokens before these positions have been run. Those of a slot ascend: the last write is the largest.
        self._draft_state.num_computed[places_T[0]] = places_T[1]
        if self._draws.keeps_scores:
            self._draft_state.scores.keep(places_T, scores_MV, lines_T)

    def _inputs(self, places: Places, last: Step | None) -> tuple[FlatBatch, np.ndarray, Tensor | None]:
        """What is run before the tokens at ``places``: what was drawn ``last``, or at first what the caches
        lack; the indices of the last tokens of each, and what a head reads of these."""
        slots_A, positions_A = places
        earlier = slots_A, positions_A - 1
        if last is None:
            batch, index_A = self._draft_state.catch_up(slots_A, positions_A)
        else:
            batch, index_A = FlatBatch(last.drawn_A.long(), *earlier), np.arange(len(slots_A))
        if self.head is None or not self.head.takes_features:
            return batch, index_A, None
        if last is not None:
            return batch, index_A, last.features_3A
        kept_3A = self._draft_state.features.head_inputs_at(earlier).astype(np.float64)
        return batch, index_A, upload(self._runner.device, kept_3A)[0].float()

    def uniforms_of_all(self, drafting: Drafting) -> None:
        """Draw the random numbers of the whole drafting at once, on the host."""
        batch, num_positions = drafting.batch, int((drafting.limits_R - drafting.begins_R).max(initial=0))
        if self._draws.settings.is_random and num_positions:
            positions_DR = batch.tails_R + np.arange(num_positions)[:, None]
            keys = self._draft_state.random_keys(batch.draft_slots_R, positions_DR)
            drafting.uniforms_DR = upload(self._runner.device, keys.uniforms(Purpose.DRAFT))[0]

    def _uniforms(self, drafting: Drafting, active_A: np.ndarray, places: Places) -> Tensor | None:
        """[A]: the random numbers of one step."""
        if not self._draws.settings.is_random:
            return None
        uniforms_DR, device = drafting.uniforms_DR, self._runner.device
        if uniforms_DR is None:
            return upload(device, self._draft_state.random_keys(*places).uniforms(Purpose.DRAFT))[0]
        depths_A = places[1] - drafting.batch.tails_R[active_A]
        if len(active_A) == uniforms_DR.shape[1] and (depths_A == depths_A[0]).all():
            return uniforms_DR[depths_A[0]]
        return uniforms_DR[upload(device, depths_A, active_A)]

    def collect(self, launched: list[LaunchedSteps]) -> tuple[DrawnTokens, bool]:
        """Wait for what the steps have drawn, and for next tokens that were not known, if there are any."""
        pending, self.pending = self.pending, None
        columns = [each.columns_DCA.flatten() for each in launched]
        columns += [] if pending is None else [pending.token_ids_W.double()]
        on_host = (torch.cat(columns) if len(columns) > 1 else columns[0]).cpu()
        parts = on_host.split([len(each) for each in columns])
        tokens = DrawnTokens.joined([each.tokens(part) for each, part in zip(launched, parts, strict=False)])
        if pending is not None:
            self._draft_state.token_ids[pending.slots_W, pending.keys_W.positions_N] = parts[-1].numpy()
        return tokens, pending is not None


class RunLengths:
    """How many steps to run before the policy is asked: as many as half of the draftings that came so far,
    and went on to here, needed, by their running average.

    A run is then the last one with a probability of about a half or more: a drafting takes two runs or less
    on average, whatever the policy, and the longest few more. A step that nobody needed costs as much as any
    other, and a wait less, so runs are no longer than that. Nothing depends on a clock.
    """

    def __init__(self, max_steps: int) -> None:
        # The number of draftings that needed so many steps. Before the first one, short ones are expected.
        self._weights_D = 0.5 ** np.arange(max_steps + 1)
        self._weights_D[0] = 0.0

    def next(self, num_steps: int) -> int:
        """The length of the next run of a drafting that has had ``num_steps`` and continues."""
        longer_D = self._weights_D[::-1].cumsum()[::-1][num_steps + 1 :]
        return min(max(1, int((longer_D >= longer_D[:1] / 2).sum())), LONGEST_RUN)

    @property
    def expects_any(self) -> bool:
        """Whether at least half of the draftings have had a step."""
        return bool(self._weights_D[0] <= self._weights_D.sum() / 2)

    def observe(self, num_steps: int) -> None:
        """A drafting has needed so many."""
        self._weights_D *= MEMORY
        self._weights_D[min(num_steps, len(self._weights_D) - 1)] += 1 - MEMORY
