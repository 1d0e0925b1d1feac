"""What a target pass is asked, and what it answers: the next tokens' distributions, as far as the rule needs
them.

The acceptance rule looks at one probability per candidate, and at a whole distribution in one place per row.
An answer promises no more than that, so that no rank needs to hold the logits of every asked token.

T flat tokens, N of them whose successor is asked for, C candidates of all rows, W places that are decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdist.models.flat import FlatBatch
from specdist.sampling.coupling import next_token_distributions
from specdist.sampling.distributions import Distributions, SamplingSettings


@dataclass(frozen=True)
class VerifyInput:
    """The tokens whose successor is asked for, and the candidates that are verified by it.

    Attributes:
        index_N: their places among the batch's flat tokens.
        stream_keys_N: random stream of each one's row.
        target_logits_indices_C: for every candidate the place among the N of the token before it, whose
            successor it claims to be.
        positions_N: position in the row of the token that is asked for.
        candidate_ids_C: token id of every candidate.
    """

    index_N: np.ndarray
    stream_keys_N: np.ndarray
    target_logits_indices_C: np.ndarray
    positions_N: np.ndarray
    candidate_ids_C: np.ndarray

    @staticmethod
    def about(
        batch: FlatBatch,
        *,
        index_N: np.ndarray,
        stream_keys_N: np.ndarray,
        target_logits_indices_C: np.ndarray,
    ) -> VerifyInput:
        """With what the batch itself says: a candidate stands right after the token that verifies it."""
        return VerifyInput(
            index_N=index_N,
            stream_keys_N=stream_keys_N,
            target_logits_indices_C=target_logits_indices_C,
            positions_N=batch.positions_T[index_N] + 1,
            candidate_ids_C=np.asarray(batch.token_ids_T)[index_N[target_logits_indices_C] + 1],
        )


class VerifyOutput(Protocol):
    """The answers of one pass, in the process that decides."""

    def candidate_probabilities(self) -> Tensor:
        """float64 [C] on the CPU: the target's probability of every candidate at its place."""
        ...

    def next_distributions(self, index_W: np.ndarray) -> Distributions:
        """The distributions at these of the N places, on the target's device. To be called once for every
        pass that asks something, as other ranks may have to take part."""
        ...


@dataclass(frozen=True)
class FullDistributions:
    """All N distributions are in this process."""

    distributions_N: Distributions
    verify_input: VerifyInput

    @staticmethod
    def of(logits_NV: Tensor, settings: SamplingSettings, verify_input: VerifyInput) -> FullDistributions:
        """From whole rows of logits."""
        keys_N = torch.from_numpy(verify_input.stream_keys_N)
        positions_N = torch.from_numpy(verify_input.positions_N)
        return FullDistributions(
            next_token_distributions(logits_NV, settings, keys_N, positions_N), verify_input
        )

    def candidate_probabilities(self) -> Tensor:
        device = self.distributions_N.device
        judges = self.distributions_N.select(
            torch.from_numpy(self.verify_input.target_logits_indices_C).to(device)
        )
        return judges.probabilities_of(torch.from_numpy(self.verify_input.candidate_ids_C).to(device)).cpu()

    def next_distributions(self, index_W: np.ndarray) -> Distributions:
        return self.distributions_N.select(torch.from_numpy(index_W).to(self.distributions_N.device))
