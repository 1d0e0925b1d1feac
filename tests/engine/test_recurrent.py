"""Models with recurrent layers: the tokens of ``generate``, whatever is drafted, rejected, branched off,
preempted and run in chunks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.prefix_states import Rollback
from tests.engine.harness import PAGE_SIZE, Harness, paged_runner, requests_for
from tests.engine.scripted import Scripted
from tests.engine.test_greedy import prompts_of_lengths, reference
from tests.models.families import RECURRENT, noisy_copy, tiny_model

LENGTHS = (3, 17, 70, 1)


@functools.cache
def target_of(family: str) -> PreTrainedModel:
    return tiny_model(family, seed=5)


@functools.cache
def expected(family: str) -> list[list[int]]:
    return [reference(target_of(family), prompt, None) for prompt in prompts_of_lengths(*LENGTHS)]


def draft_of(family: str, acceptance: str) -> PreTrainedModel:
    """Of which some tokens are accepted, or all."""
    target = target_of(family)
    return noisy_copy(target, scale=0.003) if acceptance == "some" else target


def generated(family: str, draft: PreTrainedModel | None, **options: Any) -> tuple[list[list[int]], Any]:
    replica = Harness(target_of(family), draft, max_new_tokens=24, **{"max_num_seqs": 4, **options})
    completions = replica.generate(requests_for(prompts_of_lengths(*LENGTHS)))
    return [each.token_ids for each in completions], replica.stats_recorder.close_shard(0)


@pytest.mark.parametrize("family", RECURRENT)
def test_greedy_tokens_are_those_of_generate_after_every_block(family: str) -> None:
    assert generated(family, None)[0] == expected(family)
    for num_draft_tokens, acceptance in ((8, "some"), (8, "all")):
        draft, options = draft_of(family, acceptance), {"num_draft_tokens": num_draft_tokens}
        found, stats = generated(family, draft, max_num_batched_tokens=40, **options)
        assert found == expected(family), (num_draft_tokens, acceptance)
        share = stats.num_accepted_tokens / stats.num_draft_tokens
        assert {"some": 0.2 < share < 0.97, "all": share > 0.9}[acceptance], share


@pytest.mark.parametrize("family", RECURRENT)
def test_what_is_drafted_ahead_and_in_branches_has_the_state_of_its_place(family: str) -> None:
    for acceptance in ("some", "all"):
        found, stats = generated(family, draft_of(family, acceptance), num_ahead_tokens=5, num_branches=3)
        assert found == expected(family)
        assert stats.num_ahead_hits > 0
        if acceptance == "all":  # a state that is not that of its place would be of another model
            assert stats.num_misses == 0
        else:
            assert stats.num_branch_hits > 0


@pytest.mark.parametrize("family", RECURRENT)
def test_samples_and_prompts_that_begin_alike_share_states(family: str) -> None:
    """A draft that has states runs all. Sequences are preempted, and kept states replaced by others; with the
    quickest model there are branches, too."""
    common, *others = prompts_of_lengths(22, 4, 9, 2)
    prompts = [*(common + other for other in others), others[1] * 2, common[:9]]
    expected = [reference(target_of(family), prompt, None) for prompt in prompts]
    least = sum((len(prompt) - 1) // PAGE_SIZE for prompt in prompts) * PAGE_SIZE  # the second sample's
    replica = Harness(
        target_of(family), draft_of(family, "some"), max_new_tokens=24, max_num_seqs=4, num_pages=24,
        max_num_batched_tokens=23, **({"num_ahead_tokens": 5, "num_branches": 2} if family == "lfm2" else {}),
    )  # fmt: skip
    completions = replica.generate(requests_for(prompts, num_samples=2))
    assert [each.token_ids for each in completions[::2]] == expected
    assert [each.token_ids for each in completions[1::2]] == expected
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_shared_prompt_tokens > least and stats.num_preemptions


def test_a_draft_that_is_not_asked_in_every_round_has_its_own_states() -> None:
    """Sequences share prefixes of the target's, none of the draft's."""
    common, *others = prompts_of_lengths(22, 4, 9, 2)
    prompts = [common + other for other in others]
    expected = [reference(target_of("lfm2"), prompt, None) for prompt in prompts]
    policy = Scripted([3, 2, 0, 3])
    replica = Harness(target_of("lfm2"), draft_of("lfm2", "some"), max_new_tokens=24, policy=policy)
    completions = replica.generate(requests_for(prompts, num_samples=2))
    assert [each.token_ids for each in completions[::2]] == expected
    assert [each.token_ids for each in completions[1::2]] == expected
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_shared_prompt_tokens > 0 and stats.num_draft_tokens > 0 and policy.num_paused > 0


@pytest.mark.parametrize("family", RECURRENT)
def test_an_adopted_branch_goes_on_with_its_own_state(family: str) -> None:
    """Logits of a draft's runner, against the model's own of the branch's text."""
    target, prompt = target_of(family), prompts_of_lengths(30)[0]
    runner = paged_runner(target)
    runner.allocate(
        num_pages=16, page_size=PAGE_SIZE, num_slots=1, max_seq_len=48, num_branch_slots=1,
        max_branch_tokens=8, rollback=Rollback(10),
    )  # fmt: skip
    runner.update_pages(PageUpdates(np.zeros(12, int), np.arange(12), np.arange(12)))

    def logits_after(slot: int, begin: int, token_ids: list[int]) -> torch.Tensor:
        positions = begin + np.arange(len(token_ids))
        batch = FlatBatch(np.array(token_ids), np.full(len(token_ids), slot), positions)
        return runner.forward(batch, [len(token_ids) - 1])[0]

    logits_after(0, 0, prompt)
    slot, branch, place = (np.array([number]) for number in (0, 1, 26))
    runner.cache.open_branches(slot, branch, place)
    logits_after(1, 26, [5, 9, 13])
    runner.cache.adopt_branches(branch, slot, place, np.array([3]))
    with torch.inference_mode():
        expected = target(torch.tensor([[*prompt[:26], 5, 9, 13, 21]])).logits[0, -1]
    assert torch.allclose(logits_after(0, 29, [21]), expected, atol=1e-4)
