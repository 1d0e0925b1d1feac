"""Every processor against transformers' own, at all positions of blocks, whole and in slices; and the
rejection rule on processed distributions by enumeration in float64."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from specdist.sampling.processing.processors import LogitsProcessors, allowed_tokens
from specdist.sampling.processing.row_filters import RowFilters
from specdist.sampling.processing.row_table import Processing, QueryPositions, RowTable, TokenOptions
from specdist.sampling.vocab_parallel import vocab_ranges
from tests.sampling.reference import reference_probabilities

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


def test_rows_of_one_pass_have_options_of_their_own() -> None:
    """Each position is what it is alone, whatever the others' filters."""
    rows = [TokenOptions(temperature=0.0, top_k=2), TokenOptions(top_k=3), TokenOptions(top_p=0.6),
            TokenOptions(min_p=0.3, repetition_penalty=2.0), TokenOptions(temperature=0.4)]  # fmt: skip
    token_ids = np.random.default_rng(2).integers(6, size=(len(rows), 9))
    table = RowTable(TokenOptions(), len(rows), token_ids)
    slots = np.arange(len(rows))
    table.fill(slots, np.array([row.numbers for row in rows]), np.full(len(rows), 4), token_ids[:, :0])
    logits_NV = 3 * torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(6))
    asked = QueryPositions(table, slots, slots, np.full(len(rows), 8))
    found_NV = probabilities_of(logits_NV, asked, Processing(), 2)
    for index, row in enumerate(rows):
        before = token_ids[index, :8].tolist()
        expected_V = reference_probabilities(logits_NV[index], before, Processing(), row, 4)
        torch.testing.assert_close(found_NV[index], expected_V, rtol=1e-5, atol=1e-7)


def test_a_mask_allows_its_tokens_whole_and_in_slices() -> None:
    is_allowed_NV = torch.rand(4, 70, generator=torch.Generator().manual_seed(7)) < 0.3
    bits_NV = np.pad(is_allowed_NV.numpy(), ((0, 0), (0, 26)))
    masks_NW = np.packbits(bits_NV, axis=1, bitorder="little").view(np.int32)
    assert masks_NW.shape == (4, 3)
    for num_slices in (1, 3):
        parts = [allowed_tokens(torch.from_numpy(masks_NW), ids) for ids in vocab_ranges(70, num_slices)]
        assert torch.equal(torch.cat(parts, dim=1), is_allowed_NV)


@pytest.mark.parametrize(
    "case", ["repetition", "presence", "bad words", "least length", "min-p", *list(CASES)[-8:]]
)
def test_speculation_on_processed_distributions_by_enumeration(case: str) -> None:
    """Two candidates in float64, every pair of them: the distribution of the first two emitted tokens is the
    target's own, processed with the tokens before each."""
    processing, options = CASES[case]
    size, prompt, generator = 6, [1, 2, 2], torch.Generator().manual_seed(8)
    processing = _narrowed(processing, size)
    # Logits by all tokens so far: the prompt, then none, one or two.
    target, draft = (2 * torch.randn(2, size + 1, size, dtype=torch.float64, generator=generator)).unbind()
    token_ids = np.zeros((1, 6), np.int64)
    token_ids[0, :3] = prompt
    table = RowTable(options, 1, token_ids)
    table.fill(np.array([0]), np.array([options.numbers]), np.array([3]), [token_ids[0, :3]])

    def of_block(logits_NV: Tensor, candidates: tuple[int, ...], first: int) -> Tensor:
        token_ids[0, 3 : 3 + len(candidates)] = candidates
        positions = np.arange(3 + first, 3 + first + len(logits_NV))
        lines = np.zeros(len(positions), np.int64)
        return probabilities_of(logits_NV, QueryPositions(table, lines, lines, positions), processing, 1)

    def own(first: int, before: tuple[int, ...]) -> Tensor:
        logits_V = target[0] if not before else target[1 + before[0]]
        return reference_probabilities(logits_V, [*prompt, *before], processing, options, 3)

    emitted = torch.zeros(size, size, dtype=torch.float64)
    for pair in itertools.product(range(size), repeat=2):
        # The draft draws one position at a time; the target sees the whole block at once.
        first_Q = of_block(draft[:1], (), 0)[0]
        second_Q = of_block(draft[1 + pair[0]][None], pair[:1], 1)[0]
        drawn = float(first_Q[pair[0]] * second_Q[pair[1]])
        if not drawn:
            continue
        first_P, second_P = of_block(torch.stack([target[0], target[1 + pair[0]]]), pair, 0)
        accepted = [float(min(1, p[y] / q[y])) for p, q, y in
                    ((first_P, first_Q, pair[0]), (second_P, second_Q, pair[1]))]  # fmt: skip
        emitted[pair] += drawn * accepted[0] * accepted[1]
        if accepted[0] and accepted[1] < 1:
            left = (second_P - second_Q).clamp(min=0)
            emitted[pair[0]] += drawn * accepted[0] * (1 - accepted[1]) * left / left.sum()
        if accepted[0] < 1:
            left = (first_P - first_Q).clamp(min=0)
            for token_id, chance in enumerate((left / left.sum()).tolist()):
                rest = of_block(target[1 + token_id][None], (token_id,), 1)[0]
                emitted[token_id] += drawn * (1 - accepted[0]) * chance * rest
    first = own(0, ())
    expected = torch.stack([first[token_id] * own(1, (token_id,)) for token_id in range(size)])
    torch.testing.assert_close(emitted, expected, rtol=1e-6, atol=1e-9)


def _narrowed(processing: Processing, size: int) -> Processing:
    """Of a vocabulary of so many ids."""
    return dataclasses.replace(
        processing,
        logit_bias=tuple((key % size, value) for key, value in processing.logit_bias),
        bad_words=tuple(tuple(key % size for key in word) for word in processing.bad_words),
        suppressed_ids=tuple({key % size for key in processing.suppressed_ids[:1]}),
        end_ids=tuple({key % size for key in processing.end_ids[:1]}),
    )
