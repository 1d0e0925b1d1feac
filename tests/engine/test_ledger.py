"""The books of a run: they agree with its completions, and no nanosecond is counted twice."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from specdist.engine import engine as engine_module
from specdist.engine.device_clock import DeviceClock
from specdist.engine.sequence import Request
from specdist.sampling.distributions import SamplingSettings
from specdist.stats import Stats
from tests.engine.harness import Replica
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import noisy_copy, tiny_model


def test_two_shards_that_share_passes_add_up_to_the_run() -> None:
    target = tiny_model("llama", seed=3)
    requests = [
        Request(row_id=row, sample_index=0, prompt_ids=prompt, shard=row // 4)
        for row, prompt in enumerate(prompts_of_lengths(5, 23, 40, 2, 11, 17, 33, 8))
    ]
    replica = Replica(
        target,
        noisy_copy(target, scale=0.06),
        settings=SamplingSettings(temperature=1.0),
        eos=[7],
        max_batch_rows=6,
    )
    completions = replica.generate(requests)
    shards = [replica.ledger.close_shard(shard) for shard in range(2)]
    total = Stats()
    for shard in shards:
        total.add(shard)

    for shard, stats in enumerate(shards):
        mine = [c for c in completions if c.request.shard == shard]
        assert stats.num_completions == len(mine) == 4
        assert stats.num_prompt_tokens == sum(len(c.request.prompt_ids) for c in mine)
        assert stats.num_completion_tokens == sum(len(c.token_ids) for c in mine)
        assert stats.num_drafts == sum(c.num_spec_steps for c in mine)
        assert stats.num_draft_tokens == sum(c.num_draft_tokens for c in mine)
        assert stats.num_accepted_tokens == sum(c.num_accepted_draft_tokens for c in mine)
        assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
        assert stats.cost_sums.num == 4
    # Rows of both shards shared passes: together they needed fewer than one after the other.
    assert 0 < total.num_target_passes < sum(c.num_spec_steps + 1 for c in completions)
    assert sum(dataclasses.astuple(total.target_ns)) == total.wall_ns
    assert min(dataclasses.astuple(total.target_ns)) >= 0
    # The draft's clock starts when it is made, a little before the first round.
    assert 0.5 * total.wall_ns < sum(dataclasses.astuple(total.draft_ns)) < 1.5 * total.wall_ns


class SlowEvent:
    """A device's event that is never complete when it is first asked about."""

    def __init__(self) -> None:
        self.time_ns = 0
        self.num_queries = 0

    def record(self) -> None:
        self.time_ns = time.perf_counter_ns()

    def query(self) -> bool:
        self.num_queries += 1
        return self.num_queries > 1

    def elapsed_time(self, end_event: SlowEvent) -> float:
        return (end_event.time_ns - self.time_ns) / 1e6


def test_times_that_a_device_tells_late_are_booked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark per round is read in vain, so a round's time is known one mark or more later than its end."""
    clocks: list[Any] = []

    def slow_clock(device: object) -> DeviceClock:
        del device
        clocks.append(DeviceClock(SlowEvent))
        return clocks[-1]

    monkeypatch.setattr(engine_module, "clock_of", slow_clock)
    target = tiny_model("llama", seed=3)
    requests = [
        Request(row_id=row, sample_index=0, prompt_ids=prompt)
        for row, prompt in enumerate(prompts_of_lengths(5, 23, 40, 2))
    ]
    replica = Replica(target, None, max_batch_rows=2)
    before_ns = time.perf_counter_ns()
    replica.generate(requests)
    passed_ns = time.perf_counter_ns() - before_ns
    stats = replica.ledger.close_shard(0)
    assert clocks, "the engine has asked for no clock"
    assert stats.num_target_passes == sum(stats.num_target_passes_per_size.values()) > 30
    assert sum(dataclasses.astuple(stats.target_ns)) == stats.wall_ns
    # A pass's time is that of its phase, and what was not known yet when the run ended is missing in both.
    timed_ns = sum(stats.target_pass_ns_per_size.values())
    assert 0 < timed_ns == stats.target_ns.prefill + stats.target_ns.verify < stats.wall_ns <= passed_ns
    assert stats.target_pass_ns_per_size.keys() == stats.num_target_passes_per_size.keys()
