"""A completion does not depend on the other rows, and a draft that is the target is always accepted."""

import dataclasses
from typing import Any

import pytest
from transformers import PreTrainedModel

from specdist.data.stats.shard import Stats
from specdist.engine.request import Completion, Request
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import PAGE_SIZE, Harness, llama_pair, requests_for
from tests.engine.markov import MarkovModel
from tests.engine.test_greedy import MODES, prompts_of_lengths
from tests.models.families import tiny_model

SAMPLED = SamplingSettings(temperature=1.0, top_p=0.95)
GREEDY = SamplingSettings(temperature=0.0)
# Everything in the output, including the counts of speculation.
RECORDED = [field.name for field in dataclasses.fields(Completion) if field.name != "request"]


def outcome(completions: list[Completion]) -> list[tuple[object, ...]]:
    return [tuple(getattr(c, name) for name in RECORDED) for c in completions]


VARIATIONS: list[dict[str, int]] = [
    {"max_num_seqs": 16, "max_num_batched_tokens": 512},
    # Prompts in many chunks, together with the blocks of other rows.
    {"max_num_seqs": 16, "max_num_batched_tokens": 17},
]


def check_preempted(
    target: PreTrainedModel | MarkovModel,
    draft: PreTrainedModel | MarkovModel,
    requests: list[Request],
    expected: list[Completion],
    *num_pages: int,
    **common: Any,
) -> Stats:
    """So few pages that rows are preempted and start again. Returns the statistics of all runs."""
    stats = Stats()
    for num in num_pages:
        tight = Harness(target, draft, max_num_seqs=16, num_pages=num, **common)
        assert outcome(tight.generate(requests)) == outcome(expected), num
        stats.add(tight.stats_recorder.close_shard(0))
    assert stats.num_preemptions >= len(num_pages)
    return stats


@pytest.mark.parametrize(
    ("settings", "num_ahead_tokens", "num_branches"),
    [(SAMPLED, 0, 0), (GREEDY, 4, 0), (SAMPLED, 4, 2)],
    ids=MODES,
)
def test_a_completion_is_the_same_alone_in_any_batch_chunked_or_preempted(
    settings: SamplingSettings, num_ahead_tokens: int, num_branches: int
) -> None:
    target, draft = llama_pair()
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2, 11, 17, 33, 8), num_samples=2)
    common = {"settings": settings, "eos": [7], "max_new_tokens": 20, "num_draft_tokens": 3}
    common |= {"num_ahead_tokens": num_ahead_tokens, "num_branches": num_branches}
    expected = Harness(target, draft, max_num_seqs=1, **common).generate(requests)
    for variation in VARIATIONS:
        replica = Harness(target, draft, **common, **variation)
        assert outcome(replica.generate(requests)) == outcome(expected), variation
    check_preempted(target, draft, requests, expected, 96 // PAGE_SIZE + 2, **common)


def test_samples_and_prompts_with_a_common_beginning_share_its_pages_even_later() -> None:
    target, draft = llama_pair()
    system, *rests = prompts_of_lengths(16, 5, 9, 3)
    requests = requests_for([system + rest for rest in rests], num_samples=2)
    common: dict[str, Any] = {"settings": SAMPLED, "max_new_tokens": 12, "max_num_batched_tokens": 128}
    expected = [outcome(Harness(target, draft, **common).generate([request]))[0] for request in requests]
    for max_num_seqs in (1, 8):
        replica = Harness(target, draft, max_num_seqs=max_num_seqs, **common)
        found = replica.generate(requests)
        assert outcome(found) == expected
        # The first pages of two prompts, and all full pages of second samples.
        shared = 2 * 16 + 20 + 24 + 16
        assert replica.stats_recorder.close_shard(0).num_shared_prompt_tokens == shared
        assert len({tuple(c.token_ids) for c in found}) == len(requests)


def test_ahead_no_block_length_branch_or_batch_changes_a_token() -> None:
    """Every next token but the last has a drafted token to verify, and its random numbers are those of its
    position and of the misses before it: block lengths, branches and batches leave no trace."""
    target, draft = llama_pair()
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2), num_samples=2)
    found = []
    for num_draft_tokens, num_branches in ((1, 0), (2, 3), (8, 4)):
        replica = Harness(
            target,
            draft,
            settings=SAMPLED,
            num_draft_tokens=num_draft_tokens,
            num_ahead_tokens=num_draft_tokens + 1,
            num_branches=num_branches,
            max_num_seqs=num_draft_tokens,
            max_new_tokens=30,
        )
        found.append([c.token_ids for c in replica.generate(requests)])
    assert all(token_ids == found[0] for token_ids in found)


@pytest.mark.parametrize(
    ("settings", "num_draft_tokens", "is_asynchronous"),
    [(SAMPLED, 4, False), (GREEDY, 8, False), (SAMPLED, 1, True), (SAMPLED, 4, True), (GREEDY, 4, True)],
)
def test_a_draft_that_is_the_target_is_accepted_always(
    settings: SamplingSettings, num_draft_tokens: int, is_asynchronous: bool
) -> None:
    target = tiny_model("llama", seed=3)
    replica = Harness(
        target,
        target,
        settings=settings,
        num_draft_tokens=num_draft_tokens,
        num_ahead_tokens=num_draft_tokens + 1 if is_asynchronous else 0,
        num_branches=2 * is_asynchronous,
        eos=[7],
        max_new_tokens=24,
        max_num_batched_tokens=128,
    )
    completions = replica.generate(requests_for(prompts_of_lengths(5, 23, 40, 2), num_samples=2))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert stats.num_draft_tokens > 0 or num_draft_tokens == 1
    # Everything drafted ahead is used: only at its beginning and end is a row without candidates.
    assert stats.num_ahead_hits == stats.num_ahead_verified == stats.num_ahead_chains
    assert (stats.num_ahead_chains > 0) == is_asynchronous
    assert stats.num_misses == 0
    assert stats.num_completion_tokens == sum(len(c.token_ids) for c in completions)
