"""At temperature 1 under rejection, replayed rounds have the law of a live run's rounds."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from transformers import PreTrainedModel

from specdist.engine.sequence import Completion, Request
from specdist.policies import FixedLength
from specdist.replay import ExhaustiveTrace, ReplaySettings, replay
from specdist.sampling.distributions import SamplingSettings
from specdist.stats import Stats
from tests.engine.harness import PAGE_SIZE, requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import noisy_copy, tiny_model
from tests.replay.traced import COSTS, HEAD, POLICY_NAMES, live_replica, make_policy, trace_of

PLAIN = SamplingSettings(temperature=1.0)
NUM_GROUPS, NUM_SAMPLES, BATCH = 12, 4, 9
# Two-sided, of a t distribution with 22 degrees of freedom: less than one in 10,000 for each of 24 figures.
ALARM = 4.8
# Of a rate's standard error: so the test would tell a bias of a fifth, and mostly of less.
PRECISION = 0.045
TRACE_SEED = 1000


@cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_model("llama", seed=3)
    return target, noisy_copy(target, scale=0.01)


def requests() -> list[Request]:
    """Every group has the same; samples count as rows."""
    return requests_for([prompt for prompt in prompts_of_lengths(5, 23, 12, 2) for _ in range(NUM_SAMPLES)])


def completions_of(name: str, seed: int) -> tuple[list[Completion], Stats]:
    policy = FixedLength(0) if name == "none" else make_policy(name, is_coupled=False)
    replica = live_replica(*pair(), policy, settings=PLAIN, max_batch_rows=BATCH, seed=seed)
    return replica.generate(requests()), replica.ledger.close_shard(0)


@cache
def traces() -> list[ExhaustiveTrace]:
    """Of completions that the target alone has drawn, with other seeds than any live run here."""
    return [
        trace_of(
            *pair(), completions_of("none", TRACE_SEED + group)[0], settings=PLAIN, seed=TRACE_SEED + group
        )
        for group in range(NUM_GROUPS)
    ]


def rates(stats: Stats) -> list[float]:
    counts = stats.num_row_steps, stats.num_draft_tokens, stats.num_accepted_tokens
    return [count / stats.num_completion_tokens for count in counts]


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_replayed_rates_are_those_of_live_runs(name: str) -> None:
    """Two independent samples of 12 groups of 16 completions."""
    settings = ReplaySettings(max_batch_rows=BATCH, max_batch_tokens=64, page_size=PAGE_SIZE)
    live = np.array([rates(completions_of(name, group)[1]) for group in range(NUM_GROUPS)])
    replayed = np.array(
        [
            rates(replay(make_policy(name, is_coupled=False), trace, COSTS, settings, HEAD).stats)
            for trace in traces()
        ]
    )
    errors = np.sqrt((live.var(axis=0, ddof=1) + replayed.var(axis=0, ddof=1)) / NUM_GROUPS)
    distance = (live.mean(axis=0) - replayed.mean(axis=0)) / np.maximum(errors, 1e-12)
    assert (np.abs(distance) < ALARM).all(), (name, distance, live.mean(axis=0), replayed.mean(axis=0))
    assert (errors < PRECISION * live.mean(axis=0)).all(), errors / live.mean(axis=0)
