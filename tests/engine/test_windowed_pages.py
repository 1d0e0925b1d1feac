"""Windowed layers whose pages are given back: the same tokens as with the whole cache, from fewer pages.

On the Markov pair every token that a window shows is compared with what the other layers hold, whatever
rounds, chunks, prefixes and preemptions do; small models of two families show that the keys get there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdist.engine.request import Request
from specdist.models.cache.pages import PageTable
from specdist.policies.payoff import RoundShape
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import PAGE_SIZE, Harness, requests_for
from tests.engine.markov import MarkovRunner, markov_pair
from tests.engine.sampled import COUPLED, PLAIN, PROMPTS
from tests.engine.test_greedy import MODES, prompts_of_lengths
from tests.engine.test_identity import outcome
from tests.models.families import _COMMON, noisy_copy

# No multiple of the pages' size.
WINDOW = 14
GREEDY = SamplingSettings(temperature=0.0)
AHEAD: list[dict[str, Any]] = [{}, {"num_ahead_tokens": 4}, {"num_ahead_tokens": 4, "num_branches": 2}]
# All layers, and three of four.
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"num_hidden_layers": 2},
    "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
}


def markov_prompts() -> list[Request]:
    """Some share their beginnings, of more than a window and of less."""
    generator = np.random.default_rng(0)
    common = generator.integers(0, 7, 45).tolist()
    own = [generator.integers(0, 7, length).tolist() for length in (3, 9, 30, 1)]
    longer = [common + tail for tail in own]
    return requests_for([*PROMPTS, *longer, common[:21] + own[2], longer[2][:60] + own[1]], 2)


def windowed_markov(settings: SamplingSettings = PLAIN, **options: Any) -> Harness:
    target, draft = markov_pair()
    defaults: dict[str, Any] = {
        "num_draft_tokens": 3, "max_new_tokens": 32, "max_seq_len": 256, "max_num_seqs": 6,
        "max_num_batched_tokens": 40, "num_pages": 600, "is_windowed": True,
    }  # fmt: skip
    model = dataclasses.replace(target, window=WINDOW)
    return Harness(model, draft, settings=settings, **(defaults | options))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that sequences found in shared pages."""
    found, open_ = list[int](), PageTable.open

    def noted(self: PageTable, *arguments: Any, **options: Any) -> int:
        found.append(open_(self, *arguments, **options))
        return found[-1]

    monkeypatch.setattr(PageTable, "open", noted)
    return found


def runner_of(replica: Harness) -> MarkovRunner:
    return cast(MarkovRunner, replica.runners[0])


@pytest.mark.parametrize(
    ("settings", "ahead"), [(PLAIN, AHEAD[0]), (COUPLED, AHEAD[1]), (PLAIN, AHEAD[2])], ids=MODES
)
def test_windows_hold_what_is_seen_in_any_batch_chunked_preempted_and_shared(
    settings: SamplingSettings, ahead: dict[str, Any], shared: list[int]
) -> None:
    requests = markov_prompts()
    expected = outcome(windowed_markov(settings, is_windowed=False, **ahead).generate(requests))
    num_preemptions, num_shared = 0, sum(shared)
    shared.clear()
    for limits in (
        {},
        {"max_num_seqs": 12, "num_pages": 70},
        {"max_num_batched_tokens": 23, "max_num_seqs": 5},
    ):
        replica = windowed_markov(settings, **ahead, **limits)
        assert outcome(replica.generate(requests)) == expected, limits
        num_preemptions += replica.stats_recorder.close_shard(0).num_preemptions
        assert runner_of(replica).num_seen_in_windows > 3_000
    assert num_preemptions > 2 and sum(shared) > 2 * num_shared > 200


def test_rounds_that_are_known_early_and_rounds_without_the_draft_hold_what_is_seen() -> None:
    shapes = [
        RoundShape(num_ahead=3, num_branches=1),
        RoundShape(num_rounds_alone=9),
        RoundShape(num_ahead=1),
    ]
    common: dict[str, Any] = {"num_ahead_tokens": 4, "num_branches": 2, "shapes": shapes, "max_num_seqs": 3}
    requests = markov_prompts()
    whole = windowed_markov(COUPLED, is_windowed=False, **common).generate(requests)
    replica = windowed_markov(COUPLED, **common)
    assert outcome(replica.generate(requests)) == outcome(whole)
    assert runner_of(replica).num_seen_in_windows > 3_000


def test_pages_of_a_failed_pass_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in a pass over prompts, whose pages nobody has written then."""
    requests = markov_prompts()
    expected = [completion.token_ids for completion in windowed_markov(COUPLED).generate(requests)]
    replica = windowed_markov(COUPLED)
    runner, failures = runner_of(replica), iter([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1])
    forward = runner.forward

    def failing(*arguments: Any) -> Any:
        if next(failures, 0):
            raise torch.OutOfMemoryError("planted")
        return forward(*arguments)

    monkeypatch.setattr(runner, "forward", failing)
    assert [completion.token_ids for completion in replica.generate(requests)] == expected
    assert replica.stats_recorder.close_shard(0).num_out_of_memory == 2


@functools.cache
def pair_of(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    torch.manual_seed(3)
    # A tied head repeats the last token.
    sizes = {**_COMMON, "sliding_window": WINDOW, "max_position_embeddings": 1024, **MODELS[family]}
    sizes["tie_word_embeddings"] = False
    config = AutoConfig.for_model(family, **sizes)
    target = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    return target, noisy_copy(target, scale=0.005)


@pytest.mark.parametrize("family", MODELS)
def test_windows_that_are_passed_by_far_change_no_token(family: str) -> None:
    """150 tokens; without a draft, and with blocks of up to eight candidates, some of which are rejected."""
    target, draft = pair_of(family)
    [request] = requests_for(prompts_of_lengths(33))
    common: dict[str, Any] = {
        "settings": GREEDY, "max_new_tokens": 150, "max_num_seqs": 1, "max_seq_len": 640, "num_pages": 160,
        "max_num_batched_tokens": 24,
    }  # fmt: skip
    expected, *windowed = (
        Harness(target, draft if drafts else None, num_draft_tokens=drafts, is_windowed=own, **common)
        for drafts, own in ((8, False), (8, True), (0, True))[: 3 if family == "mistral" else 2]
    )
    [wanted] = expected.generate([request])
    assert len(wanted.token_ids) == 150
    for replica in windowed:
        [found] = replica.generate([request])
        assert found.token_ids == wanted.token_ids
        assert replica.windowed is not None and replica.windowed.num_pages < 640 // PAGE_SIZE / 4
    assert len(set(wanted.token_ids)) > 20
    stats = windowed[0].stats_recorder.close_shard(0)
    assert 25 < stats.num_accepted_tokens < stats.num_draft_tokens - 25
