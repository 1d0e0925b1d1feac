"""What a draft loop is asked for, what its steps have drawn on the device, and what of it is on the host.

R draft slots to draft for, A slots that a step draws for, T tokens of several steps, one after the other, D
steps, C columns: token ids, which are exact in float64, and probabilities; three features, if they are kept;
and last a head's estimates, if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.engine.draft.steps.policy_state import PolicyState
from specdist.policies import DraftFeatures, DraftSequences, PutOff, RoundContext
from specdist.sampling.uploads import upload

# More tokens than a sequence gets in a round.
MANY_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class DraftBatch:
    """What to draft.

    Attributes:
        draft_slots_R, slots_R: where, and the slot of the sequence that it belongs to.
        tails_R: position of the first new token.
        num_wanted_R: most tokens to draft.
        most_R: and so many with those on top that a constraint forces; by default no more.
        reach_R: probability that they will be needed; 1 except for branches.
        put_off: as of :class:`DraftSequences`.
        round: for which the policy decides; None where it is not asked: for a token in the place of a next
            token, which is not a candidate, and for a block that repeats one of which it has decided before.
    """

    draft_slots_R: np.ndarray
    slots_R: np.ndarray
    tails_R: np.ndarray
    num_wanted_R: np.ndarray
    reach_R: np.ndarray
    round: RoundContext | None = None
    most_R: np.ndarray | None = None
    put_off: PutOff | None = None

    @property
    def has_prompts_left(self) -> bool:
        """Whether a step of all sequences would first run a prompt that was put off."""
        return self.put_off is not None and bool((self.put_off.num_missing_R > MANY_TOKENS).any())


class Step(NamedTuple):
    """One step's draws, on the device: their indices in the draft batch, the tokens and their probabilities;
    if they are used, their features, and a head's estimates of the tokens before them, or of these tokens if
    the head reads the drawing state."""

    active_A: np.ndarray
    drawn_A: Tensor
    probabilities_A: Tensor
    features_3A: Tensor | None
    estimates_A: Tensor | None = None

    def select(self, keep_A: np.ndarray) -> Step:
        """The rows of a mask."""
        kept = upload(self.drawn_A.device, np.flatnonzero(keep_A))[0]
        return Step(
            self.active_A[keep_A],
            self.drawn_A[kept],
            self.probabilities_A[kept],
            None if self.features_3A is None else self.features_3A[:, kept],
            None if self.estimates_A is None else self.estimates_A[kept],
        )


class LaunchedSteps(NamedTuple):
    """Steps that were launched together.

    Attributes:
        columns_DCA: on the device, float64, for the sequences of the first step.
        active_indices: of each step the indices in the draft batch, which are among those of the step before.
    """

    columns_DCA: Tensor
    first_depth: int
    active_indices: list[np.ndarray]

    @staticmethod
    def of(step: Step, depth: int) -> LaunchedSteps:
        """A single one."""
        columns = [step.drawn_A.double(), step.probabilities_A]
        columns += [] if step.features_3A is None else step.features_3A.double().unbind()
        columns += [] if step.estimates_A is None else [step.estimates_A]
        return LaunchedSteps(torch.stack(columns)[None], depth, [step.active_A])

    @property
    def last(self) -> Step:
        """The last step, on the device, of all sequences of the first."""
        columns = self.columns_DCA[-1]
        features_3A = columns[2:5].float() if has_features(columns) else None
        return Step(self.active_indices[0], columns[0], columns[1], features_3A)

    def tokens(self, columns: Tensor) -> DrawnTokens:
        """The tokens of all steps, once their columns are on the host."""
        first_A, num_steps = self.active_indices[0], len(self.active_indices)
        columns_DCA: np.ndarray = columns.view(num_steps, -1, len(first_A)).numpy()
        if len(self.active_indices[-1]) == len(first_A):
            depths_T, index_T = np.arange(num_steps).repeat(len(first_A)), np.concatenate(self.active_indices)
            columns_CT = columns_DCA.transpose(1, 0, 2).reshape(columns_DCA.shape[1], -1)
        else:
            depths_T, lines_T = np.nonzero(taking_part(self.active_indices))
            index_T, columns_CT = first_A[lines_T], columns_DCA[depths_T, :, lines_T].T
        return DrawnTokens(index_T, self.first_depth + depths_T, columns_CT)


class DrawnTokens(NamedTuple):
    """Drawn tokens on the host: each one's index in the draft batch, its step, and its columns."""

    index_T: np.ndarray
    depths_T: np.ndarray
    columns_CT: np.ndarray

    def select(self, keep_T: np.ndarray | slice) -> DrawnTokens:
        """The tokens of a mask, or of a slice."""
        return DrawnTokens(self.index_T[keep_T], self.depths_T[keep_T], self.columns_CT[:, keep_T])

    @staticmethod
    def joined(parts: list[DrawnTokens]) -> DrawnTokens:
        """The tokens of consecutive steps."""
        if len(parts) < 2:
            return parts[0] if parts else NO_TOKENS
        index, depths, columns = zip(*parts, strict=True)
        return DrawnTokens(np.concatenate(index), np.concatenate(depths), np.concatenate(columns, axis=1))

    def grid(self, index_A: np.ndarray, first: int, end: int) -> np.ndarray:
        """[C, D, A]: columns of these sequences' tokens of the steps from ``first`` to before ``end``; NaN
        where there is none."""
        shape = len(self.columns_CT), end - first, len(index_A)
        line_of = np.full(max(self.index_T.max(initial=0), index_A.max(initial=0)) + 1, -1)
        line_of[index_A] = np.arange(len(index_A))
        lines_T = line_of[self.index_T]
        if len(lines_T) == shape[1] * shape[2] and self.depths_T[0] >= first and (lines_T >= 0).all():
            return self.columns_CT.reshape(shape)
        found = np.flatnonzero((lines_T >= 0) & (self.depths_T >= first))
        columns_CDA = np.full(shape, np.nan)
        columns_CDA[:, self.depths_T[found] - first, lines_T[found]] = self.columns_CT[:, found]
        return columns_CDA

    @property
    def token_ids_T(self) -> np.ndarray:
        return self.columns_CT[0].astype(np.int64)

    @property
    def features_3T(self) -> np.ndarray | None:
        return self.columns_CT[2:5] if has_features(self.columns_CT) else None


NO_TOKENS = DrawnTokens(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((2, 0)))


def has_features(columns: Tensor | np.ndarray) -> bool:
    """Whether there are more columns than those of ids, probabilities and estimates."""
    return len(columns) > 3


@dataclass
class Drafting:
    """A batch that is being drafted.

    Attributes:
        looks: whether the policy is asked about drawn tokens.
        num_wanted_R: most tokens to draw, as far as is known; a sequence goes on while it has fewer.
        limits_R: positions that no token may reach.
        begins_R: position of the token of step 0, if it came after all tokens that were forced so far.
        uniforms_DR: the random numbers of all positions from the first new one on, if they are drawn at once.
        active_A, last_step: whom the device has drawn for in its last step, and what.
        num_steps, num_needed: steps that were launched, and those that a loop would have taken that
            waits after each.
        launched: the last steps that were launched, until they are collected.
        is_asked: whether the policy has been asked about the blocks' beginnings.
        confidences_RB: of the places of blocks whose lengths were chosen before any draw.
    """

    batch: DraftBatch
    policy_state: PolicyState
    looks: bool
    num_wanted_R: np.ndarray
    limits_R: np.ndarray
    begins_R: np.ndarray = field(init=False)
    active_A: np.ndarray = field(init=False)
    uniforms_DR: Tensor | None = None
    last_step: Step | None = None
    num_steps: int = 0
    num_needed: int = 0
    launched: list[LaunchedSteps] = field(default_factory=list)
    is_asked: bool = False
    confidences_RB: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.begins_R, self.active_A = self.batch.tails_R.copy(), np.arange(len(self.batch.tails_R))

    @property
    def ends_R(self) -> np.ndarray:
        """Positions after the last tokens that are kept."""
        ends_R: np.ndarray = self.begins_R + np.minimum(self.num_wanted_R, self.num_steps)
        return ends_R

    def shorten(self, index_A: np.ndarray, lengths_A: np.ndarray) -> None:
        """Let these have no more than so many drawn tokens."""
        self.num_wanted_R[index_A] = np.minimum(self.num_wanted_R[index_A], lengths_A)

    def places(self, index_T: np.ndarray, depth: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draft slots and positions of what is drawn by a step, or by one step each."""
        return self.batch.draft_slots_R[index_T], self.begins_R[index_T] + depth

    def sequences(
        self,
        index_A: np.ndarray,
        num_drafted: int,
        features: DraftFeatures | None = None,
        earlier_estimates_DA: np.ndarray | None = None,
    ) -> DraftSequences:
        """What the policy is asked about, of those with these indices."""
        assert self.batch.round is not None
        slots_A, put_off = self.batch.slots_R[index_A], self.batch.put_off
        return DraftSequences(
            slots_R=slots_A,
            draft_slots_R=self.batch.draft_slots_R[index_A],
            histories_RH=self.policy_state.of(slots_A),
            num_drafted=num_drafted,
            features=features,
            earlier_estimates_DR=earlier_estimates_DA,
            most_R=self.num_wanted_R[index_A],
            reach_R=self.batch.reach_R[index_A],
            put_off=put_off and PutOff(*(numbers_R[index_A] for numbers_R in put_off)),
            round=self.batch.round,
        )


def taking_part(active_indices: list[np.ndarray]) -> np.ndarray:
    """bool [D, A]: which sequences of the first step take part in each, each being among those before."""
    first_A = active_indices[0]
    if len(active_indices[-1]) == len(first_A):
        return np.ones((len(active_indices), len(first_A)), bool)
    # They ascend.
    takes_part = np.zeros((len(active_indices), first_A[-1] + 1), bool)
    for depth, active_A in enumerate(active_indices):
        takes_part[depth, active_A] = True
    return takes_part[:, first_A]
