"""What the engine needs of a draft and of a target, wherever they run.

C candidates of all sequences, one after the other, N tokens whose logits are wanted, W positions whose next
token is sampled.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from specdist.engine.blocks import VerifyInput
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.times.reports import Traffic
from specdist.engine.times.timeline import Timeline
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import Distributions
from specdist.sampling.logprobs import Logprobs


class Proposer(Protocol):
    """The draft as the engine sees it, wherever it runs."""

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        """Sample the last round's recovered and bonus tokens, and draft the next candidates.

        ``clock`` is the caller's, in its idle phase: work other than waiting is put into another phase.
        """
        ...

    def close(self) -> None:
        """No round will follow."""
        ...


class VerifyOutput(Protocol):
    """The result of a target pass, in the process that verifies."""

    def candidate_probabilities(self) -> np.ndarray:
        """float64 [C]: the target's probability of every candidate at its position."""
        ...

    def next_distributions(self, index_W: np.ndarray) -> Distributions:
        """The distributions at these of the N positions, on the target's device. To be called exactly once
        for every pass with N > 0, since other ranks may have to take part."""
        ...

    def logprobs(self, index_M: np.ndarray, token_ids_M: np.ndarray) -> Logprobs:
        """Of tokens at these of the N positions, until the next pass: if log-probabilities are wanted."""
        ...

    def prompt_logprobs(self) -> Logprobs:
        """Of the tokens of prompts that were asked for, at least one."""
        ...


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

    def forward(self, updates: PageUpdates, verify_input: VerifyInput) -> VerifyOutput:
        """Update the page table, then run the batch."""
        ...

    def close(self) -> None:
        """No pass will follow."""
        ...
