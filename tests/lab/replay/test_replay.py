"""A replay counts what a live run counts: exactly where draws are greedy or coupled."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from transformers import PreTrainedModel

from specdist.data.stats.shard import Stats
from specdist.lab.replay import ExhaustiveTrace, Oracle, ReplaySettings, replay
from specdist.policies import FixedLength
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import PAGE_SIZE, requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.lab.replay.traced import (
    CAP,
    COSTS,
    DRAWING_HEAD,
    HEAD,
    POLICY_NAMES,
    live_replica,
    make_policy,
    trace_of,
)
from tests.models.families import noisy_copy, tiny_model

SETTINGS = {
    "greedy": SamplingSettings(temperature=0.0),
    "gumbel": SamplingSettings(temperature=0.6, top_p=0.95, is_coupled=True),
}
COUNTS = (
    "num_completions", "num_completion_tokens", "num_row_steps", "num_drafts", "num_draft_tokens",
    "num_accepted_tokens", "num_accepted_tokens_per_pos", "draft_length_histogram",
    "accepted_length_histogram", "num_target_passes", "num_draft_passes", "num_rounds",
    "num_draft_row_steps", "num_empty_draft_steps",
)  # fmt: skip
# Of the harness; some rows are admitted while others decode, and the longest in two chunks.
MAX_NUM_BATCHED_TOKENS = 64


@cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_model("llama", seed=3)
    return target, noisy_copy(target)


def prompts() -> list[list[int]]:
    return prompts_of_lengths(5, 23, 40, 2, 11, 17, 60, 9, 3, 31)


@cache
def trace(sampling: str, scale: float = 0.02) -> ExhaustiveTrace:
    """``scale``: how far the draft is from the target."""
    target, draft = pair()[0], noisy_copy(pair()[0], scale=scale)
    replica = live_replica(target, draft, FixedLength(CAP), settings=SETTINGS[sampling], max_num_seqs=8)
    completions = replica.generate(requests_for(prompts()))
    return trace_of(target, draft, completions, settings=SETTINGS[sampling])


def counts(stats: Stats) -> dict[str, object]:
    return {name: getattr(stats, name) for name in COUNTS}


def replay_settings(max_num_seqs: int) -> ReplaySettings:
    return ReplaySettings(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, page_size=PAGE_SIZE
    )


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
@pytest.mark.parametrize("sampling", list(SETTINGS))
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_replayed_counts_are_those_of_a_live_run(name: str, sampling: str, max_num_seqs: int) -> None:
    check_counts(name, sampling, max_num_seqs)


def test_replayed_counts_are_those_of_a_verifier_of_the_drawing_state() -> None:
    check_counts("sprinter", "gumbel", 3, is_drawing=True)


def check_counts(name: str, sampling: str, max_num_seqs: int, *, is_drawing: bool = False) -> None:
    replica = live_replica(*pair(), make_policy(name), settings=SETTINGS[sampling], max_num_seqs=max_num_seqs,
                           is_drawing=is_drawing)  # fmt: skip
    completions = replica.generate(requests_for(prompts()))
    live = replica.stats_recorder.close_shard(0)
    head = DRAWING_HEAD if is_drawing else HEAD
    found = replay(make_policy(name), trace(sampling), COSTS, replay_settings(max_num_seqs), head,
                   reads_drawing_state=is_drawing)  # fmt: skip
    assert counts(found.stats) == counts(live)
    assert 0 < live.num_accepted_tokens < live.num_draft_tokens
    assert any(completion.finish_reason == "stop" for completion in completions)
    summary = live.summary()
    assert found.verification_rate == summary["verification_rate"]
    assert found.discard_rate == summary["discard_rate"]


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_the_oracle_is_that_of_the_theorem(max_num_seqs: int) -> None:
    """SpecDec++, Theorem 4.1: N_discarded = 0, N_target = |S| + 1, and nobody verifies less."""
    close = trace("greedy", 0.004)
    found = replay(Oracle(), close, COSTS, replay_settings(max_num_seqs))
    # |S| + 1 of every completion, the first token of which is not verified.
    assert found.stats.num_row_steps == sum(
        int((prompt.num_accepted_N[1:-1] == 0).sum()) + 1 for prompt in close.prompts if prompt.num_tokens > 1
    )
    assert found.discard_rate == 0
    # Runs longer than the trace's cap are put together.
    assert len(found.stats.draft_length_histogram) > CAP + 1
    for name in POLICY_NAMES:
        other = replay(make_policy(name), close, COSTS, replay_settings(max_num_seqs))
        assert other.stats.num_row_steps >= found.stats.num_row_steps


def test_predicted_times_are_those_of_the_passes() -> None:
    """Without candidates every row takes a pass of one token for each token but its first and last."""
    alone = replay(FixedLength(0), trace("greedy"), COSTS, replay_settings(1))
    assert alone.draft_ns == 0
    assert alone.target_ns == alone.stats.num_row_steps * float(COSTS.target(1))
    num_prompts = len(prompts())
    assert alone.stats.num_row_steps == alone.stats.num_completion_tokens - num_prompts
    drafted = replay(make_policy("fixed"), trace("greedy"), COSTS, replay_settings(1))
    assert drafted.draft_ns == drafted.stats.num_draft_passes * float(COSTS.draft(1))


def test_a_trace_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="drafts up to 7 tokens, and the trace has 6"):
        replay(FixedLength(CAP + 1), trace("greedy"), COSTS, ReplaySettings())


@pytest.mark.parametrize("name", ["specdecpp", "goodput with head"])
def test_a_trace_without_the_head_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="reads head 3, and the trace has 3"):
        replay(make_policy(name), trace("greedy"), COSTS, ReplaySettings(), head=3)


def test_another_page_size_changes_no_row() -> None:
    """Nor does a replay change the trace."""
    first, second = (
        replay(
            make_policy("svip"),
            trace("greedy"),
            COSTS,
            dataclasses.replace(replay_settings(4), page_size=size),
        )
        for size in (4, 16)
    )
    assert counts(first.stats) == counts(second.stats)
