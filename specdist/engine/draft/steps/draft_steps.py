"""What a draft loop is asked for, what its steps have drawn on the device, and what of it is on the host.

R draft slots to draft for, A slots that a step draws for, T tokens of several steps, one after the other, D
steps, C columns: token ids, which are exact in float64, and probabilities; three features, if they are kept;
and last a head's estimates, if there is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.engine.draft.steps.policy_state import PolicyState
from specdist.policies import DraftFeatures, DraftSequences, RoundContext
from specdist.sampling.uploads import upload


@dataclass(frozen=True, kw_only=True)
class DraftBatch:
    """What to draft.

    Attributes:
        draft_slots_R, slots_R: where, and the slot of the sequence that it belongs to.
        tails_R: position of the first new token.
        num_wanted_R: most tokens to draft.
        most_R: and so many with those on top that a constraint forces; by default no more.
        reach_R: probability that they will be needed; 1 except for branches.
        round: for which is drafted.
        uses_policy: False for a token in the place of a next token, which is not a candidate, and for a block
            that repeats one of which the policy has decided before.
        meanwhile: what else there is to do; called where the device has steps to take, as often as it may be.
    """

    draft_slots_R: np.ndarray
    slots_R: np.ndarray
    tails_R: np.ndarray
    num_wanted_R: np.ndarray
    reach_R: np.ndarray
    round: Callable[[], RoundContext]
    uses_policy: bool = True
    meanwhile: Callable[[], None] = lambda: None
    most_R: np.ndarray | None = None

    @cached_property
    def known_round(self) -> RoundContext:
        """Worked out once, where a policy asks for it."""
        return self.round()


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
        """Those of a mask."""
        kept = upload(self.drawn_A.device, np.flatnonzero(keep_A))[0]
        return Step(
            self.active_A[keep_A],
            self.drawn_A[kept],
            self.probabilities_A[kept],
            None if self.features_3A is None else self.features_3A[:, kept],
            None if self.estimates_A is None else self.estimates_A[kept],
        )


class GivenSteps(NamedTuple):
    """Steps that the device has been given together.

    Attributes:
        columns_DCA: on the device, float64, for the sequences of the first step.
        actives: of each step the indices in the draft batch, which are among those of the step before.
    """

    columns_DCA: Tensor
    first_depth: int
    actives: list[np.ndarray]

    @staticmethod
    def of(step: Step, depth: int) -> GivenSteps:
        """A single one."""
        columns = [step.drawn_A.double(), step.probabilities_A]
        columns += [] if step.features_3A is None else step.features_3A.double().unbind()
        columns += [] if step.estimates_A is None else [step.estimates_A]
        return GivenSteps(torch.stack(columns)[None], depth, [step.active_A])

    @property
    def last(self) -> Step:
        """The last step, on the device, of all sequences of the first."""
        columns = self.columns_DCA[-1]
        features_3A = columns[2:5].float() if has_features(columns) else None
        return Step(self.actives[0], columns[0].long(), columns[1], features_3A)

    def tokens(self, columns: Tensor) -> DrawnTokens:
        """The tokens of all steps, once their columns are on the host."""
        first_A, num_steps = self.actives[0], len(self.actives)
        columns_DCA: np.ndarray = columns.view(num_steps, -1, len(first_A)).numpy()
        if len(self.actives[-1]) == len(first_A):
            depths_T, index_T = np.arange(num_steps).repeat(len(first_A)), np.concatenate(self.actives)
            columns_CT = columns_DCA.transpose(1, 0, 2).reshape(columns_DCA.shape[1], -1)
        else:
            depths_T, lines_T = np.nonzero(taking_part(self.actives))
            index_T, columns_CT = first_A[lines_T], columns_DCA[depths_T, :, lines_T].T
        return DrawnTokens(index_T, self.first_depth + depths_T, columns_CT)


class DrawnTokens(NamedTuple):
    """On the host: each token's index in the draft batch, its step, and its columns."""

    index_T: np.ndarray
    depths_T: np.ndarray
    columns_CT: np.ndarray

    def select(self, keep_T: np.ndarray | slice) -> DrawnTokens:
        """Those of a mask, or a part of them."""
        return DrawnTokens(self.index_T[keep_T], self.depths_T[keep_T], self.columns_CT[:, keep_T])

    @staticmethod
    def joined(parts: list[DrawnTokens]) -> DrawnTokens:
        """Those of consecutive steps."""
        if len(parts) == 1:
            return parts[0]
        index, depths, columns = zip(*parts, strict=True)
        return DrawnTokens(np.concatenate(index), np.concatenate(depths), np.concatenate(columns, axis=1))

    @property
    def token_ids_T(self) -> np.ndarray:
        return self.columns_CT[0].astype(np.int64)

    @property
    def features_3T(self) -> np.ndarray | None:
        return self.columns_CT[2:5] if has_features(self.columns_CT) else None


def has_features(columns: Tensor | np.ndarray) -> bool:
    """Whether there are more columns than those of ids, probabilities and estimates."""
    return len(columns) > 3


class Told(NamedTuple):
    """What a policy is told of the tokens that were drawn last: their indices in the draft batch, their
    features, and a head's estimates of the tokens before them."""

    index_A: np.ndarray
    features: DraftFeatures | None
    earlier_estimates_A: np.ndarray | None = None

    def select(self, keep_A: np.ndarray) -> Told:
        """Those of a mask."""
        if keep_A.all():
            return self
        features, earlier_A = self.features, self.earlier_estimates_A
        return Told(
            self.index_A[keep_A],
            None if features is None else features.select(keep_A),
            None if earlier_A is None else earlier_A[keep_A],
        )

    def with_estimates(self, estimates_A: np.ndarray) -> Told:
        """With a head's estimates of the tokens themselves."""
        if self.features is None:
            return self._replace(features=DraftFeatures.of_head(estimates_A))
        return self._replace(features=dataclasses.replace(self.features, estimates_R=estimates_A))


@dataclass
class Drafting:
    """A batch that is being drafted.

    Attributes:
        asks: whether the policy has a say; ``looks``: and its answers depend on what has been drawn.
        num_wanted_R: most tokens to draw; ``limits_R``: positions that no token may reach.
        begins_R: position of the token of step 0, if it came after all tokens that were forced so far.
        ends_R: positions after the last tokens that are kept.
        goes_on_R: those that need the next step, as far as is known on the host.
        uniforms_DR: the random numbers of all positions from the first new one on, if they are drawn at once.
        active_A, newest: whom the device has drawn for in its last step, and what.
        num_steps, num_needed: steps that have been run, and those that a loop would have taken that waits
            after each.
        told: what is known of the tokens of the last step.
        confidences_RB: of the places of blocks whose lengths were chosen before any draw.
    """

    batch: DraftBatch
    asks: bool
    looks: bool
    num_wanted_R: np.ndarray
    limits_R: np.ndarray
    goes_on_R: np.ndarray = field(init=False)
    begins_R: np.ndarray = field(init=False)
    ends_R: np.ndarray = field(init=False)
    active_A: np.ndarray = field(init=False)
    uniforms_DR: Tensor | None = None
    newest: Step | None = None
    num_steps: int = 0
    num_needed: int = 0
    told: Told | None = None
    confidences_RB: np.ndarray | None = None

    def __post_init__(self) -> None:
        tails_R = self.batch.tails_R
        self.goes_on_R, self.active_A = self.limits_R > tails_R, np.arange(len(tails_R))
        self.begins_R, self.ends_R = tails_R.copy(), tails_R.copy()

    def still_going(self, tokens: DrawnTokens) -> DrawnTokens:
        """Those of sequences that go on."""
        return tokens if self.goes_on_R.all() else tokens.select(self.goes_on_R[tokens.index_T])

    def places(self, index_T: np.ndarray, depth: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draft slots and positions of what is drawn by a step, or by one step each."""
        return self.batch.draft_slots_R[index_T], self.begins_R[index_T] + depth

    def sequences(
        self, active_A: np.ndarray, depth: int, policy_state: PolicyState, told: Told | None = None
    ) -> DraftSequences:
        """What the policy is asked about, of those with these indices."""
        slots_A = self.batch.slots_R[active_A]
        return DraftSequences(
            slots_R=slots_A,
            draft_slots_R=self.batch.draft_slots_R[active_A],
            histories_RH=policy_state.of(slots_A),
            num_drafted=depth,
            features=told and told.features,
            earlier_estimates_R=told and told.earlier_estimates_A,
            reach_R=self.batch.reach_R[active_A],
            round=self.batch.known_round,
        )


def taking_part(actives: list[np.ndarray]) -> np.ndarray:
    """bool [D, A]: which sequences of the first step take part in each, each being among those before."""
    first_A = actives[0]
    if len(actives[-1]) == len(first_A):
        return np.ones((len(actives), len(first_A)), bool)
    # They ascend.
    takes_part = np.zeros((len(actives), first_A[-1] + 1), bool)
    for depth, active_A in enumerate(actives):
        takes_part[depth, active_A] = True
    return takes_part[:, first_A]
