"""The target as the engine sees it: one pass over a flat batch, and what verification needs of its logits.

The rejection rule looks at one probability per candidate, and at one whole distribution per sequence: the one
that its next token is sampled from. ``VerifyOutput`` offers no more than that, so that no rank has to hold
the logits of all tokens.

T flat tokens, N of them whose logits are wanted, C candidates of all sequences, one after the other, W
positions whose next token is sampled, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdist.cache.pages import PageUpdates
from specdist.engine.proposals import Traffic
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner
from specdist.sampling.coupling import next_token_distributions
from specdist.sampling.distributions import Distributions, SamplingSettings


@dataclass(frozen=True)
class VerifyInput:
    """The tokens whose logits are wanted, and the candidates that these logits verify.

    Attributes:
        logits_indices_N: their indices among the batch's flat tokens.
        stream_keys_N: random stream of each one's sequence.
        target_logits_indices_C: for every candidate, which of the N logits verifies it: those of the token
            before it.
        positions_N: position in the sequence of the token that the logits predict.
        candidate_ids_C: token id of every candidate.
    """

    logits_indices_N: np.ndarray
    stream_keys_N: np.ndarray
    target_logits_indices_C: np.ndarray
    positions_N: np.ndarray
    candidate_ids_C: np.ndarray

    @staticmethod
    def of_batch(
        batch: FlatBatch,
        *,
        logits_indices_N: np.ndarray,
        stream_keys_N: np.ndarray,
        target_logits_indices_C: np.ndarray,
    ) -> VerifyInput:
        """Positions and candidates are read from the batch: each candidate follows the token that verifies
        it."""
        return VerifyInput(
            logits_indices_N=logits_indices_N,
            stream_keys_N=stream_keys_N,
            target_logits_indices_C=target_logits_indices_C,
            positions_N=batch.positions_T[logits_indices_N] + 1,
            candidate_ids_C=np.asarray(batch.token_ids_T)[logits_indices_N[target_logits_indices_C] + 1],
        )


class VerifyOutput(Protocol):
    """The result of a target pass, in the process that verifies."""

    def candidate_probabilities(self) -> Tensor:
        """float64 [C] on the CPU: the target's probability of every candidate at its position."""
        ...

    def next_distributions(self, index_W: np.ndarray) -> Distributions:
        """The distributions at these of the N positions, on the target's device. To be called exactly once
        for every pass with N > 0, since other ranks may have to take part."""
        ...


@dataclass(frozen=True)
class FullDistributions:
    """The verify output of a process that holds all N distributions."""

    distributions_N: Distributions
    verify_input: VerifyInput

    @staticmethod
    def of(logits_NV: Tensor, settings: SamplingSettings, verify_input: VerifyInput) -> FullDistributions:
        """From logits over the whole vocabulary."""
        keys_N = torch.from_numpy(verify_input.stream_keys_N)
        positions_N = torch.from_numpy(verify_input.positions_N)
        return FullDistributions(
            next_token_distributions(logits_NV, settings, keys_N, positions_N), verify_input
        )

    def candidate_probabilities(self) -> Tensor:
        device = self.distributions_N.device
        distributions_C = self.distributions_N.select(
            torch.from_numpy(self.verify_input.target_logits_indices_C).to(device)
        )
        candidate_ids_C = torch.from_numpy(self.verify_input.candidate_ids_C).to(device)
        return distributions_C.probabilities_of(candidate_ids_C).cpu()

    def next_distributions(self, index_W: np.ndarray) -> Distributions:
        return self.distributions_N.select(torch.from_numpy(index_W).to(self.distributions_N.device))


class Target(Protocol):
    """Runs passes of the target model."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_single_rank(self) -> bool:
        """No other rank takes part in a pass, so that a failed pass can be repeated."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Messages among its ranks so far, without DeepSpeed's own all-reduces."""
        ...

    def forward(self, updates: PageUpdates, batch: FlatBatch, verify_input: VerifyInput) -> VerifyOutput:
        """Update the page table, then run the batch."""
        ...

    def close(self) -> None:
        """No pass will follow."""
        ...


class LocalTarget:
    """The whole target in this process.

    ``vocab_size``: number of token ids that can be drawn; the logits may be wider by padding.
    """

    is_single_rank = True

    def __init__(self, runner: ModelRunner, *, settings: SamplingSettings, vocab_size: int) -> None:
        self._runner = runner
        self._settings = settings
        self._vocab_size = vocab_size
        self.device = runner.device
        self.traffic = Traffic()

    def forward(self, updates: PageUpdates, batch: FlatBatch, verify_input: VerifyInput) -> VerifyOutput:
        self._runner.update_pages(updates)
        logits_NV = self._runner.forward(batch, verify_input.logits_indices_N)[:, : self._vocab_size]
        return FullDistributions.of(logits_NV, self._settings, verify_input)

    def close(self) -> None:
        """Nothing to do: no other rank waits."""
