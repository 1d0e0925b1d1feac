"""A lossy run emits what its mechanism says: tokens of the draft, and of the target where it is doubted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdist.engine.request import Completion
from specdist.policies.lengths.thresholds import Sprinter
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, llama_pair, requests_for
from tests.engine.heads import constant_head, random_head
from tests.engine.test_greedy import prompts_of_lengths
from tests.engine.traced_rows import check_acceptance
from tests.models.families import noisy_copy, tiny_model

CAP = 3
THRESHOLD = 0.5
SURE, UNSURE = 20.0, -20.0
COUPLED = SamplingSettings(temperature=0.9, top_k=40, top_p=0.95, is_coupled=True)


def sprinter() -> Sprinter:
    return Sprinter(max_draft_tokens=CAP, verifier_threshold=THRESHOLD)


def lossy_run(
    settings: SamplingSettings, prompts: list[list[int]], num_samples: int = 1
) -> tuple[tuple[Any, Any, Any], list[Completion]]:
    """Target, draft and head, and completions of 20 tokens, some of which were trusted, and some rejected."""
    target = tiny_model("llama", seed=3)
    draft = noisy_copy(target, scale=0.05)
    head = random_head(draft, offset=0.5)
    replica = Harness(target, draft, policy=sprinter(), head=head, trusts_draft=True, settings=settings,
                      max_new_tokens=20, is_traced=True)  # fmt: skip
    completions = replica.generate(requests_for(prompts, num_samples))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_trusted_tokens > 10 and stats.num_misses > 0
    return (target, draft, head), completions


def test_lossy_greedy_tokens_are_those_of_the_mechanism() -> None:
    """Token by token: the draft's while nothing is doubted; the target's where it rejects the draft's."""
    prompts = prompts_of_lengths(5, 23, 12, 2)
    (target, draft, head), completions = lossy_run(SamplingSettings(temperature=0.0), prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == greedy_mechanism(target, draft, head, prompt, 20)
        for token in completion.trace:
            assert token.acceptance_probability in (0, 1)
            assert token.is_verified or token.is_accepted or token.acceptance_probability is not None
    tokens = [token for completion in completions for token in completion.trace]
    # Some of them would not have been accepted.
    assert any(t.is_accepted and not t.is_verified and t.acceptance_probability == 0 for t in tokens)


def greedy_mechanism(target: Any, draft: Any, head: Any, prompt: list[int], num_tokens: int) -> list[int]:
    def best(model: Any, tokens: list[int]) -> int:
        with torch.inference_mode():
            return int(model(torch.tensor([tokens])).logits[0, -1].argmax())

    def estimate(tokens: list[int]) -> float:
        with torch.inference_mode():
            return float(head(draft.model(torch.tensor([tokens])).last_hidden_state[0, -1:]).sigmoid())

    tokens = [*prompt, best(target, prompt)]
    end = len(prompt) + num_tokens
    while len(tokens) < end:
        block: list[int] = []
        limit = min(CAP, end - len(tokens) - 1)
        while len(block) < limit:
            block.append(best(draft, tokens + block))
            if len(block) < limit and estimate(tokens + block) < THRESHOLD:
                break
        if block and block[-1] != best(target, tokens + block[:-1]):
            tokens += [*block[:-1], best(target, tokens + block[:-1])]
        else:
            tokens += [*block, best(target, tokens + block)]
    return tokens[len(prompt) :]


def test_drawn_tokens_are_verified_with_their_own_probabilities() -> None:
    """Whatever was trusted before them in a block: with min(1, P/Q) of what both models say there."""
    settings = SamplingSettings(temperature=0.7)
    (target, draft, _), completions = lossy_run(settings, prompts_of_lengths(5, 23, 12, 2), num_samples=2)
    for completion in completions:
        request = completion.request
        check_acceptance(
            target,
            draft,
            completion.trace,
            prompt_ids=request.prompt_ids,
            completion_ids=completion.token_ids,
            settings=settings,
            row_key=(0, request.row_id, request.sample_index),
        )


@pytest.mark.parametrize("ahead", [{}, {"num_ahead_tokens": CAP + 1, "num_branches": 2}],
                         ids=["none", "branches"])  # fmt: skip
def test_coupled_tokens_of_a_verifier_that_doubts_everything_are_the_target_s(ahead: dict[str, int]) -> None:
    target, draft = llama_pair()
    requests = requests_for(prompts_of_lengths(5, 23, 2), num_samples=2)
    common: dict[str, Any] = {"settings": COUPLED, "eos": [7], "max_new_tokens": 24}
    alone = [c.token_ids for c in Harness(target, None, **common).generate(requests)]
    common |= {"policy": sprinter(), "trusts_draft": True, **ahead}
    doubting = Harness(target, draft, head=constant_head(draft, UNSURE), **common)
    assert [c.token_ids for c in doubting.generate(requests)] == alone
    trusting = Harness(target, draft, head=constant_head(draft, SURE), **common)
    assert [c.token_ids for c in trusting.generate(requests)] != alone
