"""Greedy output is token-identical to transformers' own generate."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specdist.models.passes.acceleration import Acceleration
from tests.engine.harness import Harness, requests_for
from tests.models.families import VOCAB_SIZE, noisy_copy, tiny_model
from tests.models.tape import TapeCapturer

FAMILIES = ("llama", "gemma2", "gpt_neox", "gpt_neo")
MAX_NEW_TOKENS = 24
MODES = ["none", "asynchronous", "branches"]
AHEAD = dict(zip(MODES, ((0, 0), (5, 0), (5, 3)), strict=True))
KINDS = ["ragged", "static", "replayed"]
# Every family meets every mode and every kind of pass, and these meet each other.
CASES = [
    (family, mode, KINDS[(number + place) % len(KINDS)])
    for number, family in enumerate(FAMILIES)
    for place, mode in enumerate(MODES)
]


def prompts_of_lengths(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(7)
    return [generator.integers(2, VOCAB_SIZE, size=length).tolist() for length in lengths]


PROMPTS = prompts_of_lengths(3, 17, 9, 31, 1, 12)


def reference(model: PreTrainedModel, prompt: list[int], eos: int | None) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=eos,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


@cache
def answers(family: str) -> tuple[int, list[list[int]]]:
    """A stop token from the middle of one answer, so that rows end inside blocks, at different times; and the
    answers with it."""
    target = tiny_model(family)
    eos = reference(target, PROMPTS[1], None)[10]
    return eos, [reference(target, prompt, eos) for prompt in PROMPTS]


@pytest.mark.parametrize(("family", "mode", "kind_of_pass"), CASES)
def test_greedy_tokens_are_those_of_transformers_with_a_draft_that_often_misses(
    family: str, mode: str, kind_of_pass: str
) -> None:
    target, (num_ahead_tokens, num_branches) = tiny_model(family), AHEAD[mode]
    # The norms of Gemma 2 absorb the noise that makes the draft of another family miss.
    draft = noisy_copy(target, scale=0.06 if family == "gemma2" else 0.02)
    eos, expected = answers(family)
    replica = Harness(
        target,
        draft,
        num_draft_tokens=4,
        num_ahead_tokens=num_ahead_tokens,
        num_branches=num_branches,
        eos=[eos],
        max_new_tokens=MAX_NEW_TOKENS,
        max_num_seqs=4,
        acceleration=Acceleration(
            is_static=kind_of_pass != "ragged",
            capturer=TapeCapturer() if kind_of_pass == "replayed" else None,
        ),
    )
    completions = replica.generate(requests_for(PROMPTS))
    assert [completion.token_ids for completion in completions] == expected
    assert any(len(ids) < MAX_NEW_TOKENS for ids in expected)
    stats = replica.stats_recorder.close_shard(0)
    if num_ahead_tokens:
        assert stats.num_ahead_hits > 0 and stats.num_misses > 0
        assert (0 < stats.num_branch_hits < stats.num_misses) == (num_branches > 0)
    else:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
