"""What a draft loop is asked for, and what its steps have drawn: on the device until the loop is over, then
all on the host.

R draft slots to draft for, A slots that a step draws for, T tokens of several steps, one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.engine.messages.packing import NOTHING_TO_DO
from specdist.policies import DraftFeatures, RoundContext
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
    meanwhile: Callable[[], None] = NOTHING_TO_DO
    most_R: np.ndarray | None = None

    @cached_property
    def known_round(self) -> RoundContext:
        """Worked out once, where a policy asks for it."""
        return self.round()


class Step(NamedTuple):
    """One step's draws, on the device: their indices in the draft batch, the tokens and their probabilities;
    if they are used, their features, and a head's estimates of the tokens before them. Of a head that reads
    the drawing state these are of the tokens themselves, and on the host they are ``estimates``."""

    active_A: np.ndarray
    drawn_A: Tensor
    probabilities_A: Tensor
    features_3A: Tensor | None
    earlier_estimates_A: Tensor | None = None
    estimates_A: Tensor | None = None

    def on_host(self) -> Step:
        """With the draws on the host; waits for them."""
        tensors = self[1:]
        drawn_A, probabilities_A, *others = (None if each is None else each.cpu() for each in tensors)
        assert drawn_A is not None and probabilities_A is not None
        return Step(self.active_A, drawn_A, probabilities_A, *others)

    def select(self, keep_A: np.ndarray) -> Step:
        """Those of a mask."""
        if keep_A.all():
            return self
        kept = indices_of(keep_A, self.drawn_A.device)
        return Step(
            self.active_A[keep_A],
            self.drawn_A[kept],
            self.probabilities_A[kept],
            None if self.features_3A is None else self.features_3A[:, kept],
            None if self.earlier_estimates_A is None else self.earlier_estimates_A[kept],
            None if self.estimates_A is None else self.estimates_A[kept],
        )

    def tokens(self, depth: int) -> DrawnTokens:
        """Of a step on the host."""
        return DrawnTokens(
            index_T=self.active_A,
            depths_T=np.full(len(self.active_A), depth),
            token_ids_T=self.drawn_A.numpy(),
            probabilities_T=self.probabilities_A.numpy(),
            features_3T=None if self.features_3A is None else self.features_3A.double().numpy(),
        )


class DrawnTokens(NamedTuple):
    """On the host: index in the draft batch, depth, token id and probability of each token; its features
    [3, T], if they are used."""

    index_T: np.ndarray
    depths_T: np.ndarray
    token_ids_T: np.ndarray
    probabilities_T: np.ndarray
    features_3T: np.ndarray | None

    def select(self, keep_T: np.ndarray | slice) -> DrawnTokens:
        """Those of a mask, or a part of them."""
        return DrawnTokens(
            self.index_T[keep_T],
            self.depths_T[keep_T],
            self.token_ids_T[keep_T],
            self.probabilities_T[keep_T],
            None if self.features_3T is None else self.features_3T[:, keep_T],
        )


def joined(parts: list[DrawnTokens]) -> DrawnTokens:
    """Those of consecutive steps, of which all have features or none."""
    if len(parts) == 1:
        return parts[0]
    features = [part.features_3T for part in parts if part.features_3T is not None]
    return DrawnTokens(
        index_T=np.concatenate([part.index_T for part in parts]),
        depths_T=np.concatenate([part.depths_T for part in parts]),
        token_ids_T=np.concatenate([part.token_ids_T for part in parts]),
        probabilities_T=np.concatenate([part.probabilities_T for part in parts]),
        features_3T=np.concatenate(features, axis=1) if features else None,
    )


def indices_of(keep_A: np.ndarray, device: torch.device) -> Tensor:
    """The indices of a mask, on the device."""
    return upload(device, np.flatnonzero(keep_A))[0]


def fetch(steps: list[Step]) -> DrawnTokens:
    """All tokens of consecutive steps, from depth 0 on, by one copy."""
    columns = columns_of(steps).cpu().numpy()
    return DrawnTokens(
        index_T=np.concatenate([step.active_A for step in steps]),
        depths_T=np.repeat(np.arange(len(steps)), [len(step.active_A) for step in steps]),
        token_ids_T=columns[0].astype(np.int64),
        probabilities_T=columns[1],
        features_3T=None if steps[0].features_3A is None else columns[2:5],
    )


def columns_of(steps: list[Step]) -> Tensor:
    """float64 [2 to 6, T], on the device: token ids, which are exact, and probabilities; then features, and
    estimates, where every step has them."""
    columns = [
        torch.cat([step.drawn_A for step in steps]).double(),
        torch.cat([step.probabilities_A for step in steps]),
    ]
    features = [step.features_3A for step in steps if step.features_3A is not None]
    if features:
        columns.extend(torch.cat(features, dim=1).double())
    estimates = [step.earlier_estimates_A for step in steps if step.earlier_estimates_A is not None]
    if len(estimates) == len(steps):
        columns.append(torch.cat(estimates))
    return torch.stack(columns)


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


class GivenSteps(NamedTuple):
    """Steps that the device has been given together.

    Attributes:
        numbers_DCA: on the device, float64: of each step the columns of :func:`columns_of`, for the sequences
            of the first step.
        actives: of each step the indices in the draft batch, which are among those of the step before.
    """

    numbers_DCA: Tensor
    first_depth: int
    actives: list[np.ndarray]
    has_features: bool
    has_estimates: bool

    @staticmethod
    def of(step: Step, depth: int) -> GivenSteps:
        """A single one."""
        has_features, has_estimates = step.features_3A is not None, step.earlier_estimates_A is not None
        return GivenSteps(columns_of([step])[None], depth, [step.active_A], has_features, has_estimates)

    @property
    def last(self) -> Step:
        """The last step, on the device, of all sequences of the first."""
        return self._step(self.actives[0], self.numbers_DCA[-1])

    def steps(self, numbers: Tensor) -> list[Step]:
        """The steps, once their numbers are on the host."""
        return [
            self._step(self.actives[0], columns).select(keep_A)
            for columns, keep_A in zip(
                numbers.view(len(self.actives), -1, len(self.actives[0])),
                taking_part(self.actives),
                strict=True,
            )
        ]

    def tokens(self, numbers: Tensor) -> DrawnTokens:
        """The tokens of all steps, once their numbers are on the host."""
        first_A, num_steps = self.actives[0], len(self.actives)
        columns_DCA: np.ndarray = numbers.view(num_steps, -1, len(first_A)).numpy()
        if len(self.actives[-1]) == len(first_A):
            depths_T, index_T = np.arange(num_steps).repeat(len(first_A)), np.concatenate(self.actives)
            columns_CT = columns_DCA.transpose(1, 0, 2).reshape(columns_DCA.shape[1], -1)
        else:
            depths_T, lines_T = np.nonzero(taking_part(self.actives))
            index_T, columns_CT = first_A[lines_T], columns_DCA[depths_T, :, lines_T].T
        return DrawnTokens(
            index_T=index_T,
            depths_T=self.first_depth + depths_T,
            token_ids_T=columns_CT[0].astype(np.int64),
            probabilities_T=columns_CT[1],
            features_3T=columns_CT[2:5] if self.has_features else None,
        )

    def _step(self, active_A: np.ndarray, columns: Tensor) -> Step:
        features_3A = columns[2:5].float() if self.has_features else None
        estimates_A = columns[-1] if self.has_estimates else None
        return Step(active_A, columns[0].long(), columns[1], features_3A, estimates_A)


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


def at_depth(uniforms_DR: Tensor | None, depth: int, active_A: np.ndarray) -> Tensor | None:
    """[A]: the random numbers of one step."""
    if uniforms_DR is None or len(active_A) == uniforms_DR.shape[1]:
        return None if uniforms_DR is None else uniforms_DR[depth]
    return uniforms_DR[depth][upload(uniforms_DR.device, active_A)]
