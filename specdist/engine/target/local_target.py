"""The whole target in this process.

C candidates of all sequences, one after the other, N tokens whose logits are wanted, W sequences whose next
token is to be sampled, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from specdist.engine.messages.interfaces import ScoresTokens, VerifyInput, VerifyOutput
from specdist.engine.target.pipeline import LogitsPipeline, Processed
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.coupling import next_token_distributions
from specdist.sampling.distributions import Dense, Distributions, OneHot, SamplingSettings
from specdist.sampling.logprobs import (
    Logprobs,
    merged_logprobs,
    partial_prompt_scores,
    partial_scores,
    processed_logprobs,
)
from specdist.sampling.processing.row_filters import RowFilters
from specdist.sampling.uploads import upload


@dataclass(frozen=True)
class WholeLogits:
    """The logits of the whole vocabulary in this process; from ``scores``, which are processed, the pass's
    ``distributions`` were made."""

    logits_NV: Tensor
    scores_NV: Tensor
    distributions_N: Distributions
    settings: SamplingSettings
    filters: RowFilters | None
    prompt_logits_PV: Tensor
    prompt_ids_P: np.ndarray

    def prompt_logprobs(self) -> Logprobs:
        logits_PV, num_top = self.prompt_logits_PV, self.settings.num_prompt_logprobs or 0
        (ids_P,) = upload(logits_PV.device, self.prompt_ids_P)
        whole = range(logits_PV.shape[1])
        return merged_logprobs(partial_prompt_scores(logits_PV, whole, ids_P, num_top)[None], num_top)

    def logprobs(self, index_M: np.ndarray, token_ids_M: np.ndarray) -> Logprobs:
        places_M, ids_M = upload(self.logits_NV.device, index_M, token_ids_M)
        raw_MV, num_top = self.logits_NV[places_M], self.settings.num_logprobs or 0
        packed_MC = partial_scores(raw_MV, raw_MV, range(raw_MV.shape[1]), ids_M, num_top)
        return merged_logprobs(packed_MC[None], num_top, self._processed(places_M, ids_M))

    def _processed(self, places_M: Tensor, ids_M: Tensor) -> Tensor:
        """[M]: log-probabilities after processing; those of a sampled pass are known."""
        given, filters = self.distributions_N, self.filters
        if isinstance(given, Dense) and not (filters is not None and filters.has_greedy):
            return given.probabilities_at(places_M, ids_M).log()
        chosen = None if filters is None else filters.select(places_M)
        processed_MV = processed_logprobs(self.scores_NV[places_M], self.settings, chosen)
        return processed_MV.gather(1, ids_M[:, None])[:, 0]


@dataclass(frozen=True)
class FullDistributions:
    """The verify output of a process that holds all N distributions. Asking it for anything waits."""

    distributions_N: Distributions
    verify_input: VerifyInput
    scores: ScoresTokens | None = None

    @cached_property
    def _token_ids_N(self) -> np.ndarray | None:
        """The token ids of one-hot distributions. One copy brings all that a round needs of them: what
        follows waits for nothing."""
        given = self.distributions_N
        return given.token_ids_N.cpu().numpy() if isinstance(given, OneHot) else None

    @staticmethod
    def of(
        logits_NV: Tensor,
        settings: SamplingSettings,
        verify_input: VerifyInput,
        filters: RowFilters | None = None,
        scores: ScoresTokens | None = None,
    ) -> FullDistributions:
        """Distributions from logits over the whole vocabulary; with ``filters``, processed ones. ``scores``:
        where log-probabilities are wanted."""
        keys_N = torch.from_numpy(verify_input.stream_keys_N)
        positions_N = torch.from_numpy(verify_input.positions_N)
        return FullDistributions(
            next_token_distributions(logits_NV, settings, keys_N, positions_N, filters), verify_input, scores
        )

    def candidate_probabilities(self) -> np.ndarray:
        given, asked = self.distributions_N, self.verify_input
        index_C, ids_C = asked.target_logits_indices_C, asked.candidate_ids_C
        if isinstance(given, Dense):
            probabilities_C = given.probabilities_at(*upload(given.device, index_C, ids_C)).cpu()
            return np.asarray(probabilities_C.numpy())
        assert self._token_ids_N is not None
        return (self._token_ids_N[index_C] == ids_C).astype(np.float64)

    def next_distributions(self, index_W: np.ndarray) -> Distributions:
        if self._token_ids_N is not None:
            return OneHot(torch.from_numpy(self._token_ids_N[index_W]))
        return self.distributions_N.select(index_W)


class LocalTarget:
    """The whole target in this process.

    ``vocab_size``: number of token ids that can be drawn; the logits may be wider by padding.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        pipeline: LogitsPipeline | None = None,
    ) -> None:
        self._runner = runner
        self._pipeline = pipeline
        self._settings = settings
        self._vocab_size = vocab_size
        self.device = runner.device

    def forward(self, updates: PageUpdates, verify_input: VerifyInput) -> VerifyOutput:
        self._runner.update_pages(updates)
        # What is asked of the logits of a pass is computed before the next one.
        self._runner.reuses_logits = True
        logits_RV = self._runner.forward(verify_input.batch, verify_input.run_indices)
        num_logits = len(verify_input.logits_indices_N)
        logits_NV, prompt_logits_PV = logits_RV[:, : self._vocab_size].tensor_split([num_logits])
        processed = Processed(logits_NV, None)
        if self._pipeline is not None:
            asked = self._pipeline.asked_of(verify_input)
            processed = self._pipeline.process(logits_NV, asked, self._pipeline.masks(asked))
        settings, filters = self._settings, processed.filters
        found = FullDistributions.of(processed.scores_Nv, settings, verify_input, filters)
        if settings.num_logprobs is None and not len(prompt_logits_PV):
            return found
        scores = WholeLogits(
            logits_NV,
            processed.scores_Nv,
            found.distributions_N,
            settings,
            filters,
            prompt_logits_PV,
            verify_input.prompts.token_ids_P,
        )
        return dataclasses.replace(found, scores=scores)

    def check(self) -> None:
        """Nothing to do: no other rank takes part in a pass."""

    def close(self) -> None:
        """Nothing to do: no other rank waits."""
