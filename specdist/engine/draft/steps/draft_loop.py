"""The draft loop: one token per step for all sequences at once.

On a GPU the host would wait for the device after every step: its loop is in draft_runs.py.

A step is a pass and a draw. Most policies decide before the pass; one that needs a trained head's estimate of
the last token, between the two, since the pass over a token gives it. A sequence that stops there draws
nothing; a fully accepted block needs that pass, any other has run it for nothing.

A sequence is drafted in its slot. If the draft works ahead, *branches* of it are drafted in slots of their
own, numbered after those of the sequences; *draft slots* are both, and are treated alike here.

R draft slots to draft for, A of them that are still drafting, D steps, T tokens, W positions, V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from specdist.engine.draft.steps.draft_features import UNKNOWN, HeadReader, Places, told_of
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.draft.steps.draft_steps import (
    DraftBatch,
    DrawnTokens,
    Step,
    Told,
    at_depth,
    fetch,
    indices_of,
)
from specdist.engine.draft.steps.histories import Histories
from specdist.engine.faults import DRAFT_NOT_FINITE
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.engine.times.reports import PassCounts
from specdist.models.passes.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner
from specdist.policies import DraftSequences, HeadPolicy, LengthPolicy, needs_last_estimate
from specdist.sampling.distributions import NOT_FINITE, SamplingSettings
from specdist.sampling.draft_draws import DraftDraws
from specdist.sampling.random import Purpose
from specdist.sampling.uploads import upload

logger = logging.getLogger(__name__)


class DraftLoop:
    """Extends sequences and branches by tokens that the draft model draws."""

    def __init__(
        self,
        runner: ModelRunner,
        policy: LengthPolicy,
        draft_state: DraftState,
        histories: Histories,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        stop_token_ids: Collection[int],
        keeps_scores: bool,
        is_traced: bool = False,
        pipeline: LogitsPipeline | None = None,
    ) -> None:
        runner.reuses_logits = False  # they may be kept
        self._runner = runner
        self._policy = policy
        self._draft_state = draft_state
        self._histories = histories
        self._pipeline = pipeline
        self.is_stop_V = np.zeros(vocab_size, bool)
        self.is_stop_V[[token_id for token_id in stop_token_ids if token_id < vocab_size]] = True
        keeps_estimates = policy.uses_features or is_traced
        self._draws = DraftDraws(
            settings=settings,
            vocab_size=vocab_size,
            keeps_scores=keeps_scores or settings.is_random,
            keeps_features=keeps_estimates or runner.head_uses_features or runner.head_reads_drawing_state,
        )
        draft_state.features.are_kept = self._draws.keeps_features
        self._decides_after_pass = needs_last_estimate(policy) and not runner.head_reads_drawing_state
        self._head: HeadReader | None = None
        if runner.has_head:
            self._head = HeadReader(
                runner,
                draft_state.features,
                keeps_estimates=keeps_estimates,
                are_read=isinstance(policy, HeadPolicy),
            )
        self.pass_counts = PassCounts(has_head=runner.has_head)
        self._has_warned = False

    def next_tokens(self, token_ids_W: Tensor, places_W: Places, *, must_be_known: bool) -> np.ndarray:
        """Drawn next tokens, on the host; or what stands for them until :meth:`extend` has put them there."""
        return token_ids_W.cpu().numpy()

    def extend(self, draft_batch: DraftBatch) -> np.ndarray:
        """Draft from each ``tails`` position on, until there are ``num_wanted`` tokens or a stop token, or
        the policy stops. Returns the numbers [R] of tokens drafted."""
        draft_slots_R, tails_R = draft_batch.draft_slots_R, draft_batch.tails_R
        num_wanted_R = self.num_wanted(draft_batch)
        num_drafted_R = np.zeros(len(draft_slots_R), np.int64)
        uniforms_DR = self._uniforms(draft_slots_R, tails_R, int(num_wanted_R.max(initial=0)))
        # Tokens before this position have been run.
        num_computed_R = self._draft_state.num_computed[draft_slots_R]
        steps: list[Step] = []
        last: Step | None = None
        active_A = np.arange(len(draft_slots_R))
        for depth in itertools.count():
            keep_A = num_wanted_R[active_A] > depth
            if last is not None:
                keep_A &= ~self.is_stop_V[last.drawn_A.numpy()]
            active_A, last = active_A[keep_A], last and last.select(keep_A)
            decides_after_pass = self._decides_after_pass and depth > 0
            if draft_batch.uses_policy and not decides_after_pass and len(active_A):
                keep_A = self._answer(draft_batch, active_A, depth, last and self._told(last))
                active_A, last = active_A[keep_A], last and last.select(keep_A)
            if not len(active_A):
                break
            positions_A = tails_R[active_A] + depth
            logits_AV, estimates_A = self._forward(draft_slots_R[active_A], positions_A, last)
            if self._head is not None and estimates_A is not None:
                if self._pipeline is not None and not self._runner.head_reads_drawing_state:
                    estimates_A = estimates_A.cpu()
                earlier = draft_slots_R[active_A], positions_A - 1
                estimates_A = self._head.known(estimates_A, earlier, is_first=depth == 0)
            num_computed_R[active_A] = positions_A
            if draft_batch.uses_policy and decides_after_pass:
                told = last and last._replace(estimates_A=estimates_A)
                keep_A = self._answer(draft_batch, active_A, depth, told and self._told(told))
                active_A, logits_AV = active_A[keep_A], logits_AV[indices_of(keep_A, logits_AV.device)]
                if not len(active_A):
                    break
                estimates_A = None
            places = draft_slots_R[active_A], tails_R[active_A] + depth
            last = self._draw(logits_AV, active_A, places, at_depth(uniforms_DR, depth, active_A))
            if self._head is not None:
                last = self._head.with_estimates(last, estimates_A)
                last = self._head.told(last, places, is_first=not depth)
            steps.append(last)
            num_drafted_R[active_A] = depth + 1
        if steps:
            self._write(draft_slots_R, tails_R, num_drafted_R, [fetch(steps)])
            num_computed_R = np.minimum(num_computed_R, tails_R + num_drafted_R)
            self._draft_state.num_computed[draft_slots_R] = num_computed_R
        self.pass_counts.count_drafted(num_drafted_R)
        return num_drafted_R

    def num_wanted(self, draft_batch: DraftBatch) -> np.ndarray:
        """[R]: most tokens to draft; none after a stop token, or where the logits were not finite."""
        last_ids_R = self._draft_state.token_ids[draft_batch.draft_slots_R, draft_batch.tails_R - 1]
        return np.where(self._is_last(last_ids_R), 0, draft_batch.num_wanted_R)

    def _is_last(self, token_ids_R: np.ndarray) -> np.ndarray:
        return self.is_stop_V[token_ids_R] | (token_ids_R == NOT_FINITE)

    def _told(self, step: Step) -> Told:
        return told_of(step, uses_features=self._policy.uses_features)

    def _answer(self, batch: DraftBatch, active_A: np.ndarray, depth: int, told: Told | None) -> np.ndarray:
        """bool [A]: the policy's answer."""
        return self._policy.wants_more(self._rows(batch, active_A, depth, told))

    def _rows(self, batch: DraftBatch, active_A: np.ndarray, depth: int, told: Told | None) -> DraftSequences:
        """What the policy is asked about."""
        slots_A = batch.slots_R[active_A]
        return DraftSequences(
            slots_R=slots_A,
            draft_slots_R=batch.draft_slots_R[active_A],
            histories_RH=self._histories.of(slots_A),
            num_drafted=depth,
            features=told and told.features,
            earlier_estimates_R=told and told.earlier_estimates_A,
            reach_R=batch.reach_R[active_A],
            round=batch.known_round,
        )

    def _forward(
        self, draft_slots_A: np.ndarray, positions_A: np.ndarray, last: Step | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run what was drawn ``last``, or at first what the caches lack: logits [A, V] of the token at each
        position and, with a head, its estimates [A] of the one before it."""
        places = draft_slots_A, positions_A - 1
        if last is None:
            batch, index_A = self._catch_up(draft_slots_A, positions_A)
        else:
            batch, index_A = FlatBatch(last.drawn_A, *places), np.arange(len(draft_slots_A))
        self.pass_counts.count(len(batch), len(index_A))
        if self._head is None:
            return self._runner.forward(batch, index_A), None
        drawn_3A = last and last.features_3A
        known_A = None if drawn_3A is None else drawn_3A.to(self._runner.device)
        return self._head.forward(batch, index_A, places, known_A, is_first=last is None)

    def _catch_up(self, draft_slots_A: np.ndarray, positions_A: np.ndarray) -> tuple[FlatBatch, np.ndarray]:
        return self._draft_state.catch_up(draft_slots_A, positions_A)

    def _draw(
        self,
        logits_AV: Tensor,
        active_A: np.ndarray,
        places: tuple[np.ndarray, np.ndarray],
        uniforms_A: Tensor | None,
    ) -> Step:
        """One draw each."""
        stream_keys_A = torch.from_numpy(self._draft_state.stream_keys[places[0]])
        filters = None
        if self._pipeline is not None:
            logits_AV, filters = self._pipeline.process_drafted(logits_AV, places)
        drawn = self._draws.draw(logits_AV, stream_keys_A, torch.from_numpy(places[1]), uniforms_A, filters)
        if self._draws.keeps_scores:
            self._draft_state.scores.keep(*places, drawn.scores_NV)
        if self._draws.keeps_features:
            self._draft_state.features.keep_estimates(places, UNKNOWN)
        step = Step(active_A, *drawn[:3])
        if self._pipeline is None:
            return step
        # What follows is processed with what has been drawn before it.
        step = step.on_host()
        self._draft_state.token_ids[places] = step.drawn_A.numpy()
        return step

    def _uniforms(self, draft_slots_R: np.ndarray, tails_R: np.ndarray, num_steps: int) -> Tensor | None:
        """[D, R]: all random numbers of the loop."""
        if not self._draws.settings.is_random or not num_steps:
            return None
        positions_DR = tails_R + np.arange(num_steps)[:, None]
        keys = self._draft_state.random_keys(draft_slots_R, positions_DR)
        return upload(self._runner.device, keys.uniforms(Purpose.DRAFT))[0]

    def _write(
        self,
        draft_slots_R: np.ndarray,
        tails_R: np.ndarray,
        num_drafted_R: np.ndarray,
        drawn: list[DrawnTokens],
    ) -> None:
        """Keep the drawn tokens, and cut ``num_drafted_R`` after the first stop token and before
        the first one whose logits are not finite. Neither cut depends on the tokens dropped."""
        for index_T, depths_T, ids_T, probabilities_T, features_3T in drawn:
            places = draft_slots_R[index_T], tails_R[index_T] + depths_T
            self._draft_state.token_ids[places] = ids_T
            self._draft_state.probabilities[places] = probabilities_T
            if features_3T is not None:
                self._draft_state.features.keep(places, features_3T)
            ends = self.is_stop_V[ids_T].nonzero()[0]
            if len(ends):
                np.minimum.at(num_drafted_R, index_T[ends], depths_T[ends] + 1)
            nonfinite = (~(probabilities_T > 0)).nonzero()[0]
            if len(nonfinite):
                np.minimum.at(num_drafted_R, index_T[nonfinite], depths_T[nonfinite])
            if len(nonfinite) and not self._has_warned:
                self._has_warned = True
                logger.warning(DRAFT_NOT_FINITE)
