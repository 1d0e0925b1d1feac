"""What a target pass is asked, and what it answers: the next tokens' laws, as far as the rule needs them.

The acceptance rule looks at one probability per candidate, and at a whole law in one place per row. An answer
promises no more than that, so that no rank needs to hold the logits of every asked token.

T flat tokens, N of them whose successor is asked for, C candidates of all rows, W places that are decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdist.models.flat import FlatBatch
from specdist.sampling.coupling import next_token_laws
from specdist.sampling.distributions import Distributions, SamplingSettings


@dataclass(frozen=True)
class Questions:
    """The tokens whose successor is asked for, and the candidates that are judged by it.

    Attributes:
        index_N: their places among the batch's flat tokens.
        stream_keys_N: random stream of each one's row.
        judges_C: for every candidate the place among the N of the token before it, whose successor it
            claims to be.
        positions_N: position in the row of the token that is asked for.
        candidate_ids_C: token id of every candidate.
    """

    index_N: np.ndarray
    stream_keys_N: np.ndarray
    judges_C: np.ndarray
    positions_N: np.ndarray
    candidate_ids_C: np.ndarray

    @staticmethod
    def about(
        batch: FlatBatch, *, index_N: np.ndarray, stream_keys_N: np.ndarray, judges_C: np.ndarray
    ) -> Questions:
        """With what the batch itself says: a candidate stands right behind the token that judges it."""
        return Questions(
            index_N=index_N,
            stream_keys_N=stream_keys_N,
            judges_C=judges_C,
            positions_N=batch.positions_T[index_N] + 1,
            candidate_ids_C=np.asarray(batch.token_ids_T)[index_N[judges_C] + 1],
        )


class Verdicts(Protocol):
    """The answers of one pass, in the process that decides."""

    def candidate_probabilities(self) -> Tensor:
        """float64 [C] on the CPU: the target's probability of every candidate at its place."""
        ...

    def decisions(self, index_W: np.ndarray) -> Distributions:
        """The laws at these of the N places, on the target's device. To be called once for every pass that
        asks something, as other ranks may have to take part."""
        ...


@dataclass(frozen=True)
class KnownLaws:
    """All N laws are in this process."""

    laws_N: Distributions
    questions: Questions

    @staticmethod
    def of(logits_NV: Tensor, settings: SamplingSettings, questions: Questions) -> KnownLaws:
        """From whole rows of logits."""
        keys_N = torch.from_numpy(questions.stream_keys_N)
        positions_N = torch.from_numpy(questions.positions_N)
        return KnownLaws(next_token_laws(logits_NV, settings, keys_N, positions_N), questions)

    def candidate_probabilities(self) -> Tensor:
        device = self.laws_N.device
        judges = self.laws_N.select(torch.from_numpy(self.questions.judges_C).to(device))
        return judges.probabilities_of(torch.from_numpy(self.questions.candidate_ids_C).to(device)).cpu()

    def decisions(self, index_W: np.ndarray) -> Distributions:
        return self.laws_N.select(torch.from_numpy(index_W).to(self.laws_N.device))
