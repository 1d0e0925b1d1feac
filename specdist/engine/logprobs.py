"""Log-probabilities of emitted tokens: asked of the target after its pass, kept until a sequence ends.

They are kept by position. A sequence that was preempted emits the same tokens again, in the same places.

M tokens, N positions of a pass, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Protocol

import numpy as np
from torch import Tensor

from specdist.engine.request import Completion, TokenLogprobs
from specdist.engine.sequence import Sequence
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.logprobs import Logprobs, merged_logprobs, partial_scores, processed_logprobs
from specdist.sampling.row_filters import RowFilters
from specdist.sampling.uploads import upload


class ScoresTokens(Protocol):
    """What knows the logits of a pass, until the next one."""

    def logprobs(self, index_M: np.ndarray, token_ids_M: np.ndarray) -> Logprobs:
        """Of tokens at these of the N positions. All ranks of the target may have to take part."""
        ...


@dataclasses.dataclass(frozen=True)
class WholeLogits:
    """The logits of the whole vocabulary in this process; ``scores``: after processing."""

    logits_NV: Tensor
    scores_NV: Tensor
    settings: SamplingSettings
    filters: RowFilters | None

    def logprobs(self, index_M: np.ndarray, token_ids_M: np.ndarray) -> Logprobs:
        places_M, ids_M = upload(self.logits_NV.device, index_M, token_ids_M)
        raw_MV, scores_MV = self.logits_NV[places_M], self.scores_NV[places_M]
        filters = None if self.filters is None else self.filters.select(places_M)
        processed_MV = processed_logprobs(scores_MV, self.settings, filters)
        num_top = self.settings.num_logprobs or 0
        packed_MC = partial_scores(raw_MV, raw_MV, range(raw_MV.shape[1]), ids_M, num_top)
        return merged_logprobs(packed_MC[None], num_top, processed_MV.gather(1, ids_M[:, None])[:, 0])


class LogprobBook:
    """Of all tokens that the running sequences have emitted."""

    def __init__(self) -> None:
        # By the sequences' order of admission, and by position.
        self._of: dict[int, dict[int, tuple[float, float, list[int], list[float]]]] = defaultdict(dict)

    def note(
        self,
        scores: ScoresTokens,
        orders_M: list[int],
        positions_M: list[int],
        index_M: np.ndarray,
        token_ids_M: np.ndarray,
    ) -> None:
        """Tokens at these positions of their sequences, whose logits are at this index of the pass."""
        if not len(orders_M):
            return
        found = scores.logprobs(index_M, token_ids_M)
        columns = found.raw_M, found.processed_M, found.top_ids_MK, found.top_raw_MK
        lines = zip(*(column.tolist() for column in columns), strict=True)
        for order, position, line in zip(orders_M, positions_M, lines, strict=True):
            self._of[order][position] = line

    def completed(self, sequence: Sequence) -> Completion:
        """With the log-probabilities of all its tokens, unless it has an error."""
        completion, known = sequence.completion(), self._of.pop(sequence.order, {})
        if completion.error is not None:
            return completion
        first = sequence.num_prompt_tokens
        lines = [known[position] for position in range(first, first + len(completion.token_ids))]
        logprobs = TokenLogprobs(
            raw=[line[0] for line in lines],
            processed=[line[1] for line in lines],
            top_ids=[line[2] for line in lines],
            top_raw=[line[3] for line in lines],
        )
        return dataclasses.replace(completion, logprobs=logprobs)
