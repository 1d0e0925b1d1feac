"""At temperature 1 under rejection, replayed rounds have the distribution of a live run's rounds."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from transformers import PreTrainedModel

from specdist.data.stats.shard import Stats
from specdist.engine.request import Completion, Request
from specdist.lab.replay import ExhaustiveTrace, ReplaySettings, replay
from specdist.policies import FixedLength, LengthPolicy
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import PAGE_SIZE, requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.lab.replay.traced import COSTS, HEAD, POLICY_NAMES, live_replica, make_policy, trace_of
from tests.models.families import noisy_copy, tiny_model

PLAIN = SamplingSettings(temperature=1.0)
NUM_GROUPS, NUM_SAMPLES, BATCH = 12, 4, 9
# Two-sided, of a t distribution with 22 degrees of freedom: less than one in 10,000 for each of 33 figures.
ALARM = 4.8
# Of a rate's standard error: so the test would tell a bias of a fifth, and mostly of less.
PRECISION = 0.045
LIVE_SEED, TRACE_SEED = 0, 1000
# Their rows' blocks depend on the batch, and on what other rows have taught them.
BATCH_POLICIES = [name for name in POLICY_NAMES if name.startswith("goodput")]
ROW_POLICIES = [name for name in POLICY_NAMES if name not in BATCH_POLICIES]


@cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_model("llama", seed=3)
    return target, noisy_copy(target, scale=0.01)


def requests(num_samples: int) -> list[Request]:
    """So many of each prompt, one after the other; samples count as rows."""
    return requests_for([prompt for prompt in prompts_of_lengths(5, 23, 12, 2) for _ in range(num_samples)])


def policy_of(name: str) -> LengthPolicy:
    return FixedLength(0) if name == "none" else make_policy(name, is_coupled=False)


def by_group(completions: list[Completion]) -> list[list[Completion]]:
    """Each with NUM_SAMPLES rows of every prompt."""
    return [completions[group::NUM_GROUPS] for group in range(NUM_GROUPS)]


@cache
def all_at_once(name: str, seed: int) -> list[Completion]:
    """Of all groups, in one batch."""
    asked = requests(NUM_GROUPS * NUM_SAMPLES)
    replica = live_replica(*pair(), policy_of(name), settings=PLAIN, max_num_seqs=len(asked), seed=seed,
                           max_num_batched_tokens=8 * len(asked), num_pages=16 * len(asked))  # fmt: skip
    return replica.generate(asked)


@cache
def traces() -> list[ExhaustiveTrace]:
    """Of completions that the target alone has drawn, with another seed than any live run here."""
    return [
        trace_of(*pair(), completions, settings=PLAIN, seed=TRACE_SEED)
        for completions in by_group(all_at_once("none", TRACE_SEED))
    ]


def rates(stats: Stats) -> list[float]:
    counts = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
    return [count / stats.num_completion_tokens for count in counts]


def check_rates(name: str, live: list[list[float]]) -> None:
    """Two independent samples of 12 groups of 16 completions."""
    settings = ReplaySettings(max_num_seqs=BATCH, max_num_batched_tokens=64, page_size=PAGE_SIZE)
    replayed = np.array(
        [rates(replay(policy_of(name), trace, COSTS, settings, HEAD).stats) for trace in traces()]
    )
    found = np.array(live)
    errors = np.sqrt((found.var(axis=0, ddof=1) + replayed.var(axis=0, ddof=1)) / NUM_GROUPS)
    distance = (found.mean(axis=0) - replayed.mean(axis=0)) / np.maximum(errors, 1e-12)
    assert (np.abs(distance) < ALARM).all(), (name, distance, found.mean(axis=0), replayed.mean(axis=0))
    assert (errors < PRECISION * found.mean(axis=0)).all(), errors / found.mean(axis=0)


@pytest.mark.parametrize("name", ROW_POLICIES)
def test_replayed_rates_are_those_of_a_live_run(name: str) -> None:
    """In any batch: the blocks of a row depend on that row alone."""
    live = []
    for group in by_group(all_at_once(name, LIVE_SEED)):
        num_tokens = sum(len(completion.token_ids) for completion in group)
        counts = [(c.num_spec_steps, c.num_draft_tokens, c.num_accepted_draft_tokens) for c in group]
        live.append([sum(column) / num_tokens for column in zip(*counts, strict=True)])
    check_rates(name, live)


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCH_POLICIES)
def test_replayed_rates_are_those_of_live_batches(name: str) -> None:
    """Each group is a run of its own, in which the policy learns from the beginning."""
    live = []
    for seed in range(NUM_GROUPS):
        replica = live_replica(
            *pair(), policy_of(name), settings=PLAIN, max_num_seqs=BATCH, seed=LIVE_SEED + seed
        )
        replica.generate(requests(NUM_SAMPLES))
        live.append(rates(replica.stats_recorder.close_shard(0)))
    check_rates(name, live)
