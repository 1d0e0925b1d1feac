"""What transformers' processors make of one position's logits: the reference for the project's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdist.sampling.processing.row_table import Processing, TokenOptions


class CountPenalties(LogitsProcessor):
    """OpenAI's formula: logit -= count × frequency + (count > 0) × presence, of the completion's tokens."""

    def __init__(self, options: TokenOptions, num_prompt_tokens: int) -> None:
        self._options = options
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token_id, count in Counter(input_ids[0, self._num_prompt_tokens :].tolist()).items():
            scores[0, token_id] -= count * self._options.frequency_penalty + self._options.presence_penalty
        return scores


def processors(processing: Processing, options: TokenOptions, num_prompt_tokens: int) -> LogitsProcessorList:
    """In the order of ``GenerationMixin._get_logits_processor``."""
    found: list[LogitsProcessor] = []
    if processing.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(key,): value for key, value in processing.logit_bias}))
    if options.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    found.append(CountPenalties(options, num_prompt_tokens))
    if processing.bad_words:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in processing.bad_words]))
    if processing.min_new_tokens:
        found.append(
            MinNewTokensLengthLogitsProcessor(
                num_prompt_tokens, processing.min_new_tokens, list(processing.end_ids)
            )
        )
    if processing.suppressed_ids:
        found.append(SuppressTokensLogitsProcessor(list(processing.suppressed_ids)))
    if options.temperature:
        found.append(TemperatureLogitsWarper(options.temperature))
        if options.top_k:
            found.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            found.append(TopPLogitsWarper(options.top_p))
        if options.min_p:
            found.append(MinPLogitsWarper(options.min_p))
    return LogitsProcessorList(found)


def reference_probabilities(
    logits_V: Tensor,
    token_ids: Sequence[int],
    processing: Processing,
    options: TokenOptions,
    num_prompt_tokens: int,
) -> Tensor:
    """[V]: the distribution of the token after these."""
    scores_V: Tensor = processors(processing, options, num_prompt_tokens)(
        torch.tensor([list(token_ids)]), logits_V[None].clone()
    )[0]
    if options.temperature == 0:
        return torch.nn.functional.one_hot(scores_V.argmax(), len(scores_V)).to(scores_V.dtype)
    return scores_V.softmax(dim=0)
