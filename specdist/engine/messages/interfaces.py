"""What the engine needs of a draft and of a target, wherever they run.

C candidates of all sequences, one after the other, N tokens whose logits are wanted, W positions whose next
token is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from specdist.engine.messages.opened import NOTHING_OPENED, OpenedSequences
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.times.timeline import Timeline
from specdist.models.batch.flat import FlatBatch
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


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """Tokens of prompts whose log-probabilities are wanted.

    Attributes:
        indices_P: of the tokens before them, among the batch's.
        token_ids_P: what they are.
    """

    indices_P: np.ndarray
    token_ids_P: np.ndarray


NO_PROMPT_TOKENS = PromptTokens(*np.zeros((2, 0), np.int64))


@dataclass(frozen=True, kw_only=True)
class VerifyInput:
    """A pass: the batch, the tokens whose logits are wanted, and the candidates that these logits verify.

    Attributes:
        logits_indices_N: indices of the tokens whose logits are wanted, among the batch's.
        stream_keys_N: random stream of each one's sequence.
        target_logits_indices_C: for every candidate, which of the N logits verifies it: those of the token
            before it.
        opened: what is known of the rows that begin, where logits are processed.
        prompts: where prompts are scored.
    """

    batch: FlatBatch
    logits_indices_N: np.ndarray
    stream_keys_N: np.ndarray
    target_logits_indices_C: np.ndarray
    opened: OpenedSequences = NOTHING_OPENED
    prompts: PromptTokens = NO_PROMPT_TOKENS

    @property
    def run_indices(self) -> np.ndarray:
        """Indices of all tokens whose logits a pass computes, those of prompts last."""
        if not len(self.prompts.indices_P):
            return self.logits_indices_N
        return np.concatenate([self.logits_indices_N, self.prompts.indices_P])

    @property
    def positions_N(self) -> np.ndarray:
        """Positions in their sequences of the tokens that the logits predict."""
        return self.batch.positions_T[self.logits_indices_N] + 1

    @property
    def candidate_ids_C(self) -> np.ndarray:
        """Each candidate follows the token whose logits verify it."""
        index_C = self.logits_indices_N[self.target_logits_indices_C] + 1
        return np.asarray(self.batch.token_ids_T)[index_C]


class ScoresTokens(Protocol):
    """What knows the logits of a pass, until the next one. All ranks of the target may have to take part."""

    def logprobs(self, index_M: np.ndarray, token_ids_M: np.ndarray) -> Logprobs:
        """Log-probabilities of tokens at these of the N positions, if they are wanted."""
        ...

    def prompt_logprobs(self) -> Logprobs:
        """Log-probabilities of the tokens of prompts that were asked for, at least one."""
        ...


class VerifyOutput(Protocol):
    """The result of a target pass, in the process that verifies."""

    @property
    def scores(self) -> ScoresTokens | None:
        """What knows the pass's logits; None where no log-probabilities are wanted."""
        ...

    def candidate_probabilities(self) -> np.ndarray:
        """float64 [C]: the target's probability of every candidate at its position."""
        ...

    def next_distributions(self, index_W: np.ndarray) -> Distributions:
        """The distributions at these of the N positions, on the target's device. To be called exactly once
        for every pass with N > 0, since other ranks may have to take part."""
        ...


class Target(Protocol):
    """Runs passes of the target model."""

    @property
    def device(self) -> torch.device: ...

    def forward(self, updates: PageUpdates, verify_input: VerifyInput) -> VerifyOutput:
        """Update the page table, then run the batch."""
        ...

    def check(self) -> None:
        """Raises RuntimeError if a pass that has ended is wrong on all ranks, and no row's fault."""
        ...

    def close(self) -> None:
        """No pass will follow."""
        ...
