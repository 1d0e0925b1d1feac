"""A lossy run emits what its mechanism says, between the draft's law and the target's, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdist.policies import Sprinter
from specdist.sampling.distributions import SamplingSettings
from specdist.theory import sprinter_run_length, sprinter_stopping_time
from tests.engine.harness import Replica, requests_for
from tests.engine.heads import NoiseHead, constant_head, random_head
from tests.engine.sprinter_law import sprinter_law
from tests.engine.test_coupling import COUPLED
from tests.engine.test_greedy import MODES, prompts_of_lengths
from tests.engine.test_law import (
    ALARM,
    DEPTH,
    FILTERED,
    PLAIN,
    bucket_p_values,
    completion_law,
    small_pair,
    small_replica,
)
from tests.engine.test_policies import num_lengths
from tests.models.families import noisy_copy, tiny_model
from tests.statistics import chi_square_p_value

CAP = 3
THRESHOLD = 0.5
SURE, UNSURE = 20.0, -20.0
AHEAD = [{}, {"num_ahead_tokens": CAP + 1}]
every_mode = pytest.mark.parametrize("ahead", [*AHEAD, {**AHEAD[1], "num_branches": 2}], ids=MODES)


def sprinter(cap: int = CAP) -> Sprinter:
    return Sprinter(max_draft_tokens=cap, verifier_threshold=THRESHOLD)


def lossy_replica(
    settings: SamplingSettings, head: torch.nn.Module, cap: int = CAP, **options: Any
) -> Replica:
    return small_replica(cap, settings, policy=sprinter(cap), head=head, trusts_draft=True, **options)


@pytest.mark.parametrize("settings", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("ahead", AHEAD, ids=MODES[:2])
def test_the_output_follows_the_law_of_the_mechanism(
    ahead: dict[str, int], settings: SamplingSettings
) -> None:
    target, draft = small_pair()
    head = random_head(draft, spread=4.0)
    replica = lossy_replica(settings, head, **ahead)
    distances = []

    def law_of(prompt: list[int]) -> torch.Tensor:
        law = sprinter_law(
            (target, draft), head, prompt, settings, depth=DEPTH, threshold=THRESHOLD, cap=CAP, **ahead
        )
        distances.append(float((law - completion_law(target, prompt, settings)).abs().sum()) / 2)
        return law

    p_values = bucket_p_values(replica, target, law_of=law_of)
    assert min(p_values) > ALARM, p_values
    stats = replica.ledger.close_shard(0)
    assert num_lengths(stats) > 1 and stats.num_misses > 100 and stats.num_trusted_tokens > 1000
    # And that is not the target's.
    assert min(distances) > 0.1, distances


@every_mode
def test_a_verifier_that_doubts_all_leaves_the_target_s_law(ahead: dict[str, int]) -> None:
    target, draft = small_pair()
    replica = lossy_replica(PLAIN, constant_head(draft, UNSURE), **ahead)
    p_values = bucket_p_values(replica, target)
    assert min(p_values) > ALARM, p_values
    stats = replica.ledger.close_shard(0)
    assert stats.num_trusted_tokens == 0 and stats.num_misses > 100


def test_a_verifier_that_doubts_nothing_leaves_the_draft_s_law() -> None:
    """Between the prompt's own decision and what ends a row: its last candidate and the bonus token."""
    target, draft = small_pair()
    replica = lossy_replica(PLAIN, constant_head(draft, SURE), cap=DEPTH)
    for prompt in ([1, 2, 3, 1], [4]):
        first_V = completion_law(target, prompt, PLAIN).view(5, -1).sum(1)
        of_draft = completion_law(draft, prompt, PLAIN).view(5, 5 ** (DEPTH - 3), -1).sum(2)
        behind = of_draft / of_draft.sum(1, keepdim=True)
        expected = (first_V[:, None] * behind).flatten()
        completions = replica.generate(requests_for([prompt], 3000))
        found = torch.tensor([c.token_ids for c in completions])
        heads = (found[:, : DEPTH - 2] * 5 ** torch.arange(DEPTH - 3, -1, -1)).sum(1)
        counts = torch.bincount(heads, minlength=len(expected))
        assert p_value_of_many(counts, expected) > ALARM
        assert p_value_of_many(counts, completion_law(target, prompt, PLAIN).view(-1, 25).sum(1)) < 1e-8


def p_value_of_many(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Over buckets, as most completions are rare."""
    buckets = torch.randint(40, (len(law),), generator=torch.Generator().manual_seed(4))
    found = torch.zeros(40, dtype=torch.int64).index_add_(0, buckets, counts)
    return chi_square_p_value(found, torch.zeros(40, dtype=torch.float64).index_add_(0, buckets, law))


@pytest.mark.parametrize("is_traced", [False, True], ids=["plain", "traced"])
def test_greedy_tokens_are_those_of_the_mechanism(is_traced: bool) -> None:
    """Token by token: the draft's while nothing is doubted; the target's in place of what it denies."""
    target = tiny_model("llama", seed=3)
    draft = noisy_copy(target, scale=0.05)
    head = random_head(draft, offset=0.5)
    replica = Replica(target, draft, policy=sprinter(), head=head, trusts_draft=True, max_new_tokens=20,
                      is_traced=is_traced)  # fmt: skip
    prompts = prompts_of_lengths(5, 23, 12, 2)
    completions = replica.generate(requests_for(prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == greedy_mechanism(target, draft, head, prompt, 20)
        for token in completion.trace:
            assert token.acceptance_probability in (0, 1)
            assert token.is_judged or token.is_accepted or token.acceptance_probability is not None
    stats = replica.ledger.close_shard(0)
    assert stats.num_trusted_tokens > 10 and stats.num_misses > 0
    tokens = [token for completion in completions for token in completion.trace]
    # Some would not have been accepted.
    assert (
        any(t.is_accepted and not t.is_judged and t.acceptance_probability == 0 for t in tokens) == is_traced
    )


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


@every_mode
def test_coupled_tokens_of_a_verifier_that_doubts_all_are_the_target_s(ahead: dict[str, int]) -> None:
    target = tiny_model("llama", seed=3)
    draft = noisy_copy(target)
    requests = requests_for(prompts_of_lengths(5, 23, 2), num_samples=2)
    common: dict[str, Any] = {"settings": COUPLED, "eos": [7], "max_new_tokens": 24}
    alone = [c.token_ids for c in Replica(target, None, **common).generate(requests)]
    common |= {"policy": sprinter(), "trusts_draft": True, **ahead}
    doubting = Replica(target, draft, head=constant_head(draft, UNSURE), **common)
    assert [c.token_ids for c in doubting.generate(requests)] == alone
    trusting = Replica(target, draft, head=constant_head(draft, SURE), **common)
    assert [c.token_ids for c in trusting.generate(requests)] != alone


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_runs_and_steps_are_as_long_as_the_theorems_say(share: float) -> None:
    """Theorems 2 and 3 where all tokens are acceptable, since the draft is the target, and the verifier lets
    each of them pass with the same chance."""
    target = tiny_model("llama", seed=3)
    replica = Replica(
        target, target, policy=Sprinter(max_draft_tokens=60, verifier_threshold=1 - share),
        head=NoiseHead(), trusts_draft=True, settings=PLAIN, max_new_tokens=150, max_seq_len=200,
        max_batch_tokens=2000, num_pages=3000,
    )  # fmt: skip
    replica.generate(requests_for(prompts_of_lengths(5, 23, 12, 8), num_samples=6))
    stats = replica.ledger.close_shard(0)
    assert stats.num_drafts > 500 and stats.num_misses == 0
    known = {"num_acceptable": 10**6, "true_positive": share, "false_positive": 0.5}
    # A few per cent of the runs are cut short by the end of their row.
    run_length = stats.num_trusted_tokens / stats.num_drafts
    assert run_length == pytest.approx(sprinter_run_length(**known), rel=0.08)
    num_steps = stats.num_draft_tokens / stats.num_drafts
    assert num_steps == pytest.approx(sprinter_stopping_time(t_draft=1.0, **known), rel=0.06)
