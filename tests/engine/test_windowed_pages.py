"""Windowed layers whose pages are given back: the same tokens as with the whole cache, from fewer pages.

On the Markov pair every token that a window shows is compared with what the other layers hold, whatever
rounds, chunks, prefixes and preemptions do. That keys of transformers get there show the models' own tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pytest

from specdist.engine.request import Request
from specdist.models.cache.pages import PageTable
from specdist.policies.payoff import RoundShape
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import MarkovRunner, markov_pair
from tests.engine.sampled import AHEAD, COUPLED, PLAIN, PROMPTS
from tests.engine.test_greedy import MODES
from tests.engine.test_identity import outcome

# No multiple of the pages' size.
WINDOW = 14


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
    assert num_preemptions > 1 and sum(shared) > 2 * num_shared > 200


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
