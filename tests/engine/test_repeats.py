"""Completions that end in a loop: where, and that nothing but the tokens themselves decides it.

Alone of all tests these notice a loop that is looked for at the ends of blocks alone, one of another length,
and copies of a prompt's tokens that count.
"""

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdist.engine.request import FinishReason, Request
from specdist.engine.request import Sequence as Running
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.policies.payoff import RoundShape
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import VOCAB_SIZE, MarkovModel
from tests.engine.sampled import markov_replica
from tests.engine.test_goodput import goodput

# Tokens that depend on nothing that is drafted.
COUPLED = SamplingSettings(temperature=1.0, is_coupled=True)
# The second and the third are in a loop before they begin; of the last the completion breaks it.
PROMPTS = [[1], [0, 1, 2] * 40, [3, 4, 5, 6] * 30, [2, 5], [6, 6, 1], [4], [0, 3], [3, 4, 5, 6] * 9 + [0]]
MANY, LENGTH = requests_for(PROMPTS, 3), 160


def looping_model() -> MarkovModel:
    """Two cycles, of three and of four tokens, that it leaves for another token now and then."""
    following = torch.tensor([1, 2, 0, 4, 5, 6, 3])
    logits = torch.randn((VOCAB_SIZE,) * 3, generator=torch.Generator().manual_seed(2))
    return MarkovModel(logits + 6.5 * torch.nn.functional.one_hot(following).float()[:, None])


TARGET = looping_model()
NOISY = MarkovModel(TARGET.logits_VVV + 2.5 * torch.randn(TARGET.logits_VVV.shape))


def loop_at_end(token_ids: Sequence[int], num_copies: int) -> int:
    """The tokens of a copy; 0 where the end is no loop."""
    for size in range(1, 65):
        most = max(64, num_copies * size)
        tail = list(token_ids[-most:])
        if len(tail) == most and tail == (tail[:size] * (most // size + 1))[:most]:
            return size
    return 0


def first_loop(token_ids: Sequence[int], num_copies: int) -> tuple[int, int]:
    """How many tokens there are until the first loop has ended, and until its first copy has: all, if there
    is none."""
    for end in range(1, len(token_ids) + 1):
        if size := loop_at_end(token_ids[:end], num_copies):
            return end, end - max(64, num_copies * size) + size
    return len(token_ids), len(token_ids)


def replica(draft: MarkovModel | None = None, **options: Any) -> Harness:
    options = {"max_new_tokens": LENGTH, "max_seq_len": 288} | options
    return markov_replica(COUPLED, pair=(TARGET, draft), **options)


@functools.cache
def whole() -> list[list[int]]:
    """The tokens without the option."""
    return [completion.token_ids for completion in replica().generate(MANY)]


@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft": TARGET, "num_draft_tokens": 16},
        {"draft": NOISY, "num_draft_tokens": 5},
        {"draft": NOISY, "policy": goodput(COUPLED)},
        {"ngrams": True, "num_draft_tokens": 9},
        {"draft": NOISY, "num_ahead_tokens": 4, "num_branches": 2},
        {"draft": NOISY, "num_ahead_tokens": 4, "shapes": [RoundShape(num_ahead=3), RoundShape()]},
        {"draft": TARGET, "num_draft_tokens": 7, "num_pages": 150},
    ],
    ids=["alone", "accepted", "fixed", "goodput", "ngrams", "ahead", "chosen", "preempted"],
)
def test_a_completion_is_what_it_is_without_the_option_up_to_its_first_loop(
    options: dict[str, Any], num_seqs: int
) -> None:
    """Whatever the blocks, the batch, and the tokens of the prompt."""
    step = 3 if num_seqs == 1 else 1
    tokens = whole()[::step]
    expected = [first_loop(token_ids, 4)[0] for token_ids in tokens]
    assert len(tokens) / 4 < sum(end < LENGTH for end in expected) < len(expected), "of both kinds"
    found = replica(**options, stop_repeats=4, max_num_seqs=num_seqs).generate(MANY[::step])
    cut = [token_ids[:end] for token_ids, end in zip(tokens, expected, strict=True)]
    assert [each.token_ids for each in found] == cut
    reasons = ["length" if end == LENGTH else "repetition" for end in expected]
    assert [each.finish_reason for each in found] == reasons


def test_the_first_copy_alone_may_be_kept_and_a_request_may_say_so() -> None:
    expected = [first_loop(token_ids, 2)[1] for token_ids in whole()]
    run = replica(TARGET, num_draft_tokens=7, stop_repeats=-2).generate(MANY)
    own = [Request(**(vars(request) | {"stop_repeats": -2})) for request in MANY]
    for found in (run, replica(NOISY, stop_repeats=9).generate(own)):
        assert [len(each.token_ids) for each in found] == expected
        assert all(each.text == "".join(chr(65 + i) for i in each.token_ids) for each in found)


def ended(token_ids: list[int], num_copies: int, most: int) -> tuple[int, FinishReason | None]:
    """Where the rules end tokens that come in blocks of up to ``most``, after a prompt that loops."""
    request = Request(row_id=0, sample_index=0, prompt_ids=token_ids[:1] * 99)
    running = Running(
        request=request, order=1, stream_key=0, max_length=9**9, token_ids=[*request.prompt_ids]
    )
    rules, begin, reason = StopRules(NO_TEXT, repeats=num_copies), 0, None
    while begin < len(token_ids) and reason is None:
        block = token_ids[begin : begin + random.randint(0, most)]
        num_kept, reason = rules.check(running, block)
        running.token_ids += block[:num_kept]
        begin += num_kept
    return begin, reason


@pytest.mark.parametrize("num_copies", [2, 4, 9])
def test_the_end_of_a_loop_is_found_at_its_token_in_blocks_of_any_lengths(num_copies: int) -> None:
    """Of copies of 1 to 66 tokens, one token short or not, and other loops before."""
    random.seed(num_copies)
    reasons: set[FinishReason | None] = set()
    for size in (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66):
        copy = [random.randrange(3) for _ in range(size - 1)] + [3]
        most = max(64, num_copies * size)
        other = [4, 5] * random.randint(0, 31) + [random.randrange(9) for _ in range(random.randrange(99))]
        for num_tokens in (most - 1, most, most + 40):
            text = other + (copy * most)[:num_tokens] + [7]
            end = first_loop(text, num_copies)[0]
            found = ended(text, num_copies, random.choice([1, 4, 30]))
            reasons.add(found[1])
            assert found == (end, "repetition" if end < len(text) else None), (size, num_tokens)
    assert reasons == {None, "repetition"}
