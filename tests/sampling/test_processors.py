"""Every processor against transformers' own, at all positions of blocks, whole and in slices."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
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

from specdist.sampling.processing.processors import LogitsProcessors, allowed_tokens
from specdist.sampling.processing.row_filters import RowFilters
from specdist.sampling.processing.row_table import Processing, QueryPositions, RowTable, TokenOptions
from specdist.sampling.vocab_parallel import vocab_ranges

CPU = torch.device("cpu")
VOCAB_SIZE = 40
NUM_PROMPT_TOKENS = (3, 11)
# A block of five positions of each of two sequences, which repeat tokens of prompt and block.
FIRST_POSITIONS, BLOCK = (9, 14), 5

ALONE: dict[str, tuple[Processing, TokenOptions]] = {
    "temperature": (Processing(), TokenOptions(temperature=0.6)),
    "greedy": (Processing(), TokenOptions(temperature=0.0)),
    "top-k": (Processing(), TokenOptions(top_k=7)),
    "top-p": (Processing(), TokenOptions(top_p=0.7)),
    "min-p": (Processing(), TokenOptions(min_p=0.1)),
    "repetition": (Processing(), TokenOptions(repetition_penalty=1.4)),
    "presence": (Processing(), TokenOptions(presence_penalty=0.9)),
    "frequency": (Processing(), TokenOptions(frequency_penalty=-0.6)),
    "logit bias": (Processing(logit_bias=((3, 2.5), (30, -4.0))), TokenOptions()),
    "bad words": (Processing(bad_words=((4,), (1, 2), (2, 2, 33))), TokenOptions()),
    "least length": (Processing(min_new_tokens=8, end_ids=(5, 21)), TokenOptions()),
    "suppressed": (Processing(suppressed_ids=(0, 39)), TokenOptions()),
}
NUM_COMBINATIONS = 12


def combination(seed: int) -> tuple[Processing, TokenOptions]:
    """About half of all options, with numbers of their own."""
    generator = np.random.default_rng(seed)

    def chosen(value: float, other: float) -> float:
        return float(value) if generator.random() < 0.5 else other

    options = TokenOptions(
        temperature=chosen(generator.uniform(0.3, 1.5), 1.0),
        top_k=int(chosen(generator.integers(2, 12), 0)),
        top_p=chosen(generator.uniform(0.5, 0.99), 1.0),
        min_p=chosen(generator.uniform(0.01, 0.2), 0.0),
        repetition_penalty=chosen(generator.uniform(0.7, 1.6), 1.0),
        presence_penalty=chosen(generator.uniform(-1, 1), 0.0),
        frequency_penalty=chosen(generator.uniform(-1, 1), 0.0),
    )
    given = [pair for pair, _ in ALONE.values() if pair != Processing() and generator.random() < 0.5]
    merged = Processing()
    for processing in given:
        changed = {
            field.name: value
            for field in dataclasses.fields(Processing)
            if (value := getattr(processing, field.name)) != field.default and field.name != "defaults"
        }
        merged = dataclasses.replace(merged, **changed)
    return merged, options


CASES = ALONE | {f"combination {seed}": combination(seed) for seed in range(NUM_COMBINATIONS)}


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


def table_of(options: TokenOptions) -> tuple[RowTable, QueryPositions]:
    """Two sequences in the slots 2 and 0, of which the second has the same options."""
    token_ids = np.random.default_rng(1).integers(6, size=(3, 24))
    table = RowTable(TokenOptions(), 3, token_ids)
    slots = np.array([2, 0])
    table.fill(slots, np.tile(options.numbers, (2, 1)), np.array(NUM_PROMPT_TOKENS), [token_ids[2, :4]] * 2)
    slots_N = np.repeat(slots, BLOCK)
    positions_N = (np.array(FIRST_POSITIONS)[:, None] + np.arange(BLOCK)).ravel()
    return table, QueryPositions(table, slots_N, slots_N, positions_N)


def probabilities_of(
    logits_NV: Tensor, asked: QueryPositions, processing: Processing, num_slices: int
) -> Tensor:
    scores = [
        LogitsProcessors(processing, ids, CPU).process(logits_NV[:, ids.start : ids.stop], asked)
        for ids in vocab_ranges(logits_NV.shape[1], num_slices)
    ]
    vocab_size = logits_NV.shape[1]
    return RowFilters.of(asked, vocab_size, CPU).probabilities(torch.cat(scores, dim=1))


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_processor_does_what_transformers_does(case: str, num_slices: int) -> None:
    processing, options = CASES[case]
    _, asked = table_of(options)
    logits_NV = 3 * torch.randn(2 * BLOCK, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    found_NV = probabilities_of(logits_NV, asked, processing, num_slices)
    num_prompt_tokens = np.repeat(NUM_PROMPT_TOKENS, BLOCK).tolist()
    for index, num_prompt in enumerate(num_prompt_tokens):
        before = asked.tokens_before(index).tolist()
        expected_V = reference_probabilities(logits_NV[index], before, processing, options, num_prompt)
        # In float32, sums in another order.
        torch.testing.assert_close(found_NV[index], expected_V, rtol=1e-5, atol=1e-7)
    plain = probabilities_of(logits_NV, table_of(TokenOptions())[1], Processing(), 1)
    assert (found_NV - plain).abs().max() > 1e-3, "nothing was tested"


def test_a_mask_allows_its_tokens_whole_and_in_slices() -> None:
    is_allowed_NV = torch.rand(4, 70, generator=torch.Generator().manual_seed(7)) < 0.3
    bits_NV = np.pad(is_allowed_NV.numpy(), ((0, 0), (0, 26)))
    masks_NW = np.packbits(bits_NV, axis=1, bitorder="little").view(np.int32)
    assert masks_NW.shape == (4, 3)
    for num_slices in (1, 3):
        parts = [allowed_tokens(torch.from_numpy(masks_NW), ids) for ids in vocab_ranges(70, num_slices)]
        assert torch.equal(torch.cat(parts, dim=1), is_allowed_NV)
