"""Completions that end in a loop. Alone of all tests these notice one that is looked for at ends of blocks
only, one of another length, and copies of a prompt's tokens that count."""

import functools
import random
from typing import Any

import pytest
import torch

from specdist.engine.request import Sequence
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import MarkovModel
from tests.engine.sampled import markov_replica
from tests.engine.test_goodput import goodput

# Tokens that depend on nothing that is drafted, on two cycles that are left now and then.
COUPLED = SamplingSettings(temperature=1.0, is_coupled=True)
CYCLES = torch.nn.functional.one_hot(torch.tensor([1, 2, 0, 4, 5, 6, 3])).float()[:, None]
NOISE = torch.randn(2, 7, 7, 7, generator=torch.Generator().manual_seed(2))
TARGET, NOISY = (MarkovModel(6.5 * CYCLES + noise) for noise in (NOISE[0], NOISE[0] + 2.5 * NOISE[1]))
PROMPTS = [[1], [0, 1, 2] * 40, [3, 4, 5, 6] * 30, [2, 5], [6, 6, 1], [4], [0, 3], [3, 4, 5, 6] * 9 + [0]]
MANY, LENGTH = requests_for(PROMPTS, 3), 160
SIZES = {"max_new_tokens": LENGTH, "max_seq_len": 288, "max_num_seqs": 8}


def first_loop(token_ids: list[int], num_copies: int) -> tuple[int, int]:
    """How many tokens there are until the first loop has ended, and until its first copy has; or all."""
    for end in range(1, len(token_ids) + 1):
        for size in range(1, 65):
            begin = end - max(64, num_copies * size)
            copy = token_ids[begin : begin + size] if begin >= 0 else []
            if copy and token_ids[begin:end] == (copy * -(-(end - begin) // size))[: end - begin]:
                return end, begin + size
    return len(token_ids), len(token_ids)


def replica(draft: MarkovModel | None = None, **options: Any) -> Harness:
    return markov_replica(COUPLED, pair=(TARGET, draft), **{**SIZES, **options})


@functools.cache
def whole() -> list[tuple[list[int], int, int]]:
    """The tokens without the option, and where they loop first."""
    found = [completion.token_ids for completion in replica().generate(MANY)]
    return [(token_ids, *first_loop(token_ids, 4)) for token_ids in found]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft": NOISY, "num_draft_tokens": 5, "max_num_seqs": 1},
        {"draft": TARGET, "num_draft_tokens": 16},
        {"draft": NOISY, "num_draft_tokens": 5, "stop_repeats": -4},
        {"draft": NOISY, "policy": goodput(COUPLED)},
        {"ngrams": True, "num_draft_tokens": 9},
        {"draft": NOISY, "num_ahead_tokens": 4, "num_branches": 2},
        {"draft": TARGET, "num_draft_tokens": 7, "num_pages": 150},
    ],
)
def test_completions_are_as_without_it_to_their_first_loop(options: dict[str, Any]) -> None:
    """Whatever the blocks, the batch, and the tokens of the prompt."""
    step = 3 if "max_num_seqs" in options else 1
    assert 6 < sum(end < LENGTH for _, end, _ in whole()[::3]) + 1 <= len(PROMPTS)
    found = replica(**{"stop_repeats": 4} | options).generate(MANY[::step])
    for completion, (token_ids, end, first) in zip(found, whole()[::step], strict=True):
        assert completion.token_ids == token_ids[: first if "stop_repeats" in options else end]
        assert completion.finish_reason == ("length" if end == LENGTH else "repetition")
        assert len(completion.text) == len(completion.token_ids)


@pytest.mark.parametrize("num_copies", [2, 4, 9])
def test_the_end_of_a_loop_is_found_at_its_token_in_blocks_of_any_lengths(num_copies: int) -> None:
    """Of copies of 1 to 66 tokens, one token short or not, and other loops before."""
    random.seed(num_copies)
    rules = StopRules(NO_TEXT, repeats=num_copies)
    for size in (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66):
        copy = [random.randrange(3) for _ in range(size - 1)] + [3]
        other = [random.randrange(4, 99) for _ in range(99)]
        # The second loop has begun where the first one could have ended; the last one begins the completion.
        for num_more, before in ((-1, [4, 5] * 31 + other), (0, other[: max(63 - size, 0)]), (40, [])):
            text = before + (copy * 64)[: max(64, num_copies * size) + num_more] + [7]
            request, begin, reason = requests_for([text[:1] * 99])[0], 0, None
            so_far = Sequence(request, order=1, stream_key=0, max_length=9**9, token_ids=text[:1] * 99)
            while begin < len(text) and reason is None:
                num_kept, reason = rules.check(so_far, text[begin : begin + random.choice([0, 1, 4, 30])])
                so_far.token_ids += text[begin : begin + num_kept]
                begin += num_kept
            end = first_loop(text, num_copies)[0]
            assert (begin, reason) == (end, "repetition" if end < len(text) else None), (size, num_more)
