"""The draft loop: one token per step for many rows at once, without waiting for the device in between.

On a GPU the drawn tokens stay on the device from step to step; the host reads them when the loop is over. All
that a step needs is known beforehand (positions, random numbers, how many tokens each row wants), unless the
policy uses features.

A step is a pass and a draw. Most policies decide before the pass. One that reads a trained head decides
between the two, since the pass over a token gives the head's estimate of that token. A row that stops there
has run its last token and draws nothing; the pass is not wasted, since a fully accepted block needs it
anyway. A head may also read the features of the token, which are known since its draw; a token that the draft
has not drawn has no features and gets no estimate.

R rows to draft for (sequences, and with draft-ahead their branches), A of them that are still drafting, D
steps, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.engine.draft_state import ESTIMATE, UNKNOWN, DraftState
from specdist.engine.histories import Histories
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner
from specdist.policies import DraftedRows, DraftFeatures, HeadPolicy, LengthPolicy, RoundContext
from specdist.sampling.branch_estimates import draft_distributions, draft_features
from specdist.sampling.distributions import NOT_FINITE, SamplingSettings
from specdist.sampling.random import Purpose, uniforms

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DraftBatch:
    """The rows to draft for.

    Attributes:
        rows_R, slots_R: rows of the draft's page table, and the slot that each belongs to.
        tails_R: position of each row's first new token.
        num_wanted_R: most tokens to draft for each.
        reach_R: probability that each row will be needed; 1 for a slot's own row.
        uses_policy: False for a token in the place of a next token, which is not a candidate, and for a block
            that repeats one of which the policy has decided before.
    """

    rows_R: np.ndarray
    slots_R: np.ndarray
    tails_R: np.ndarray
    num_wanted_R: np.ndarray
    reach_R: np.ndarray
    round: RoundContext
    uses_policy: bool = True

    @staticmethod
    def of_slots(
        slots_R: np.ndarray,
        tails_R: np.ndarray,
        num_wanted_R: np.ndarray,
        round: RoundContext,
        *,
        uses_policy: bool = True,
    ) -> DraftBatch:
        """Sequences only, without branches."""
        return DraftBatch(
            rows_R=slots_R,
            slots_R=slots_R,
            tails_R=tails_R,
            num_wanted_R=num_wanted_R,
            reach_R=np.ones(len(slots_R)),
            round=round,
            uses_policy=uses_policy,
        )


class _Step(NamedTuple):
    """One step's draws, on the device, and the indices of their rows in the draft batch.

    ``features_3A``: of the drawn tokens, if they are used. ``earlier_estimates_A``: a head's estimates, on
    the host, of the tokens before them.
    """

    active_A: np.ndarray
    drawn_A: Tensor
    probabilities_A: Tensor
    features_3A: Tensor | None
    earlier_estimates_A: np.ndarray | None = None

    def select(self, keep_A: np.ndarray) -> _Step:
        """The rows of a mask."""
        if keep_A.all():
            return self
        kept = _on_device(keep_A, self.drawn_A.device)
        return _Step(
            self.active_A[keep_A],
            self.drawn_A[kept],
            self.probabilities_A[kept],
            None if self.features_3A is None else self.features_3A[:, kept],
            None if self.earlier_estimates_A is None else self.earlier_estimates_A[keep_A],
        )


class DraftLoop:
    """Extends chains by tokens that the draft model draws."""

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
    ) -> None:
        self._runner = runner
        self._policy = policy
        self._draft_state = draft_state
        self._histories = histories
        self._settings = settings
        self._vocab_size = vocab_size
        self.is_stop_V = np.zeros(vocab_size, bool)
        self.is_stop_V[[token_id for token_id in stop_token_ids if token_id < vocab_size]] = True
        self._keeps_scores = keeps_scores or settings.is_random
        self._keeps_estimates = policy.uses_features or is_traced
        self._keeps_features = self._keeps_estimates or runner.head_uses_features
        self._decides_after_pass = isinstance(policy, HeadPolicy)
        # Nothing is drafted after a stop token. Only on a host can that be checked after every step for free.
        self._watches_stops = runner.device.type == "cpu"
        # Tokens of every pass, and tokens that the head has read, since they were last taken.
        self._pass_sizes: list[int] = []
        self._num_head_tokens = 0
        self._has_warned = False

    def take_counts(self) -> tuple[list[int], int]:
        """Tokens of every pass since the last call, and tokens of which the head has given estimates."""
        counts = self._pass_sizes, self._num_head_tokens
        self._pass_sizes, self._num_head_tokens = [], 0
        return counts

    def extend(self, draft_batch: DraftBatch) -> np.ndarray:
        """Draft from each row's ``tails`` position on, until it has ``num_wanted`` tokens or a stop token, or
        the policy stops it. Returns the number of tokens drafted per row."""
        rows_R, tails_R = draft_batch.rows_R, draft_batch.tails_R
        last_ids_R = self._draft_state.token_ids[rows_R, tails_R - 1]
        is_stopped_R = self.is_stop_V[last_ids_R] | (last_ids_R == NOT_FINITE)
        num_wanted_R = np.where(is_stopped_R, 0, draft_batch.num_wanted_R)
        num_drafted_R = np.zeros(len(rows_R), np.int64)
        uniforms_RD = self._uniforms(rows_R, tails_R, int(num_wanted_R.max(initial=0)))
        # Tokens before this position have been run.
        num_computed_R = self._draft_state.num_computed[rows_R]
        steps: list[_Step] = []
        active_A = np.arange(len(rows_R))
        for depth in itertools.count():
            last = steps[-1] if steps else None
            keep_A = num_wanted_R[active_A] > depth
            if last is not None and self._watches_stops:
                keep_A &= ~self.is_stop_V[last.drawn_A.numpy()]
            decides_after_pass = self._decides_after_pass and depth > 0
            if draft_batch.uses_policy and not decides_after_pass and keep_A.any():
                keep_A[keep_A] = self._policy.wants_more(
                    self._policy_input(draft_batch, active_A, keep_A, depth, last)
                )
            active_A = active_A[keep_A]
            if not len(active_A):
                break
            last = None if last is None else last.select(keep_A)
            logits_AV, estimates_A = self._pass(rows_R[active_A], tails_R[active_A] + depth, last)
            num_computed_R[active_A] = tails_R[active_A] + depth
            if draft_batch.uses_policy and decides_after_pass:
                all_A = np.ones(len(active_A), bool)
                keep_A = self._policy.wants_more(
                    self._policy_input(draft_batch, active_A, all_A, depth, last, estimates_A)
                )
                active_A, logits_AV = active_A[keep_A], logits_AV[_on_device(keep_A, logits_AV.device)]
                if not len(active_A):
                    break
                estimates_A = None
            uniforms_A = None if uniforms_RD is None else uniforms_RD[active_A, depth]
            step = self._draw(logits_AV, active_A, rows_R[active_A], tails_R[active_A] + depth, uniforms_A)
            # The estimates are of the tokens before these; at depth 0 that token is not in the block.
            steps.append(step._replace(earlier_estimates_A=estimates_A if depth else None))
            num_drafted_R[active_A] = depth + 1
        if steps:
            self._write(rows_R, tails_R, num_drafted_R, steps)
            self._draft_state.num_computed[rows_R] = np.minimum(num_computed_R, tails_R + num_drafted_R)
        return num_drafted_R

    def _policy_input(
        self,
        draft_batch: DraftBatch,
        active_A: np.ndarray,
        keep_A: np.ndarray,
        depth: int,
        last: _Step | None,
        estimates_A: np.ndarray | None = None,
    ) -> DraftedRows:
        """What the policy decides by; ``last`` is the rows' last step, ``estimates`` the head's for its
        tokens."""
        index = active_A[keep_A]
        features = earlier_A = None
        if last is not None:
            if self._policy.uses_features and last.features_3A is not None:
                features = DraftFeatures(*last.features_3A.cpu().double().numpy()).select(keep_A)
            if last.earlier_estimates_A is not None:
                earlier_A = last.earlier_estimates_A[keep_A]
        if estimates_A is not None:
            if features is None:
                features = DraftFeatures.of_head(estimates_A)
            else:
                features = dataclasses.replace(features, estimates_R=estimates_A)
        return DraftedRows(
            slots_R=draft_batch.slots_R[index],
            draft_rows_R=draft_batch.rows_R[index],
            histories_RH=self._histories.of(draft_batch.slots_R[index]),
            num_drafted=depth,
            features=features,
            earlier_estimates_R=earlier_A,
            reach_R=draft_batch.reach_R[index],
            round=draft_batch.round,
        )

    def _pass(
        self, rows_A: np.ndarray, positions_A: np.ndarray, last: _Step | None
    ) -> tuple[Tensor, np.ndarray | None]:
        """Run what was drawn ``last``, or at first what the rows' caches lack: the logits [A, V] of the token
        at each position, and, where they are asked for, the head's estimates [A] of the one before it.
        """
        places = rows_A, positions_A - 1
        if last is None:
            batch, index = self._draft_state.catch_up(rows_A, positions_A)
        else:
            batch, index = FlatBatch(last.drawn_A, *places), np.arange(len(rows_A))
        self._pass_sizes.append(len(batch))
        if not self._runner.has_head:
            return self._runner.forward(batch, index)[:, : self._vocab_size], None
        self._num_head_tokens += len(rows_A)
        features_3A = None
        if self._runner.head_uses_features:
            features_3A = self._kept_features(places) if last is None else last.features_3A
        logits_AV, estimates_A = self._runner.forward_with_estimates(batch, index, features_3A)
        known_A = None
        if self._keeps_estimates or (self._decides_after_pass and last is not None):
            known_A = estimates_A.cpu().numpy()
        if self._keeps_estimates and known_A is not None:
            if last is None:
                known_A = np.where(self._draft_state.is_drafted(places), known_A, UNKNOWN)
            self._draft_state.keep_estimates(places, known_A)
        return logits_AV[:, : self._vocab_size], known_A

    def _kept_features(self, places: tuple[np.ndarray, np.ndarray]) -> Tensor:
        """[3, A], as an earlier draft loop has kept them. The head's estimate of a token that the draft has
        not drawn is dropped, whatever its features are here."""
        features_4A = np.nan_to_num(self._draft_state.feature_rows_at(places))
        return torch.from_numpy(features_4A[:ESTIMATE]).to(self._runner.device)

    def _draw(
        self,
        logits_AV: Tensor,
        active_A: np.ndarray,
        rows_A: np.ndarray,
        positions_A: np.ndarray,
        uniforms_A: Tensor | None,
    ) -> _Step:
        """One draw per row."""
        distributions_A, scores_AV, undecided = draft_distributions(
            logits_AV,
            self._settings,
            torch.from_numpy(self._draft_state.stream_keys[rows_A]),
            torch.from_numpy(positions_A),
        )
        # Where the logits are not finite, any id will do for the next pass: the chain is cut before it.
        drawn_A = distributions_A.draw(uniforms_A).clamp(min=0)
        if self._keeps_scores:
            self._draft_state.keep_scores(rows_A, positions_A, scores_AV)
        features_3A = None
        if self._keeps_features:
            features_3A = draft_features(logits_AV, undecided, drawn_A, self._settings)
            self._draft_state.keep_estimates((rows_A, positions_A), UNKNOWN)
        return _Step(active_A, drawn_A, distributions_A.probabilities_of(drawn_A), features_3A)

    def _uniforms(self, rows_R: np.ndarray, tails_R: np.ndarray, num_steps: int) -> Tensor | None:
        """[R, D]: all random numbers of the loop."""
        if not self._settings.is_random or not num_steps:
            return None
        return uniforms(
            torch.from_numpy(self._draft_state.stream_keys[rows_R])[:, None],
            torch.from_numpy(tails_R[:, None] + np.arange(num_steps)),
            torch.from_numpy(self._draft_state.num_misses[rows_R])[:, None],
            Purpose.DRAFT,
        ).to(self._runner.device)

    def _write(
        self,
        rows_R: np.ndarray,
        tails_R: np.ndarray,
        num_drafted_R: np.ndarray,
        steps: list[_Step],
    ) -> None:
        """Copy the drawn tokens to the host, and cut ``num_drafted_R`` after the first stop token and before
        the first one whose logits are not finite. Neither cut depends on the tokens dropped."""
        lines_T = np.concatenate([step.active_A for step in steps])
        depths_T = np.repeat(np.arange(len(steps)), [len(step.active_A) for step in steps])
        drawn_T = torch.cat([step.drawn_A for step in steps])
        # Token ids are exact in float64, so that one copy brings all.
        columns = [drawn_T.double(), torch.cat([step.probabilities_A for step in steps])]
        if self._keeps_features:
            features = [step.features_3A for step in steps if step.features_3A is not None]
            columns.extend(torch.cat(features, dim=1).double())
        ids_T, probabilities_T, *features_3T = torch.stack(columns).cpu().numpy()
        places = rows_R[lines_T], tails_R[lines_T] + depths_T
        self._draft_state.token_ids[places] = ids_T.astype(np.int64)
        self._draft_state.probabilities[places] = probabilities_T
        if features_3T:
            self._draft_state.keep_features(places, np.stack(features_3T))
        ends = np.flatnonzero(self.is_stop_V[ids_T.astype(np.int64)])
        np.minimum.at(num_drafted_R, lines_T[ends], depths_T[ends] + 1)
        nonfinite = np.flatnonzero(~(probabilities_T > 0))
        np.minimum.at(num_drafted_R, lines_T[nonfinite], depths_T[nonfinite])
        if len(nonfinite) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the draft's logits are not finite (NaN or infinite) at some positions: "
                "no tokens are drafted there"
            )


def _on_device(keep_A: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(keep_A).to(device)
