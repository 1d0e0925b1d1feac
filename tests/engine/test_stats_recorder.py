"""The statistics of a run: they agree with its completions, and no nanosecond is counted twice."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdist.data.stats.fields import TargetTimes
from specdist.data.stats.shard import AheadOutcome, Stats
from specdist.engine.messages.proposals import ProposalReply
from specdist.engine.request import Request, Sequence
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.plan import RoundPlan
from specdist.engine.times.reports import AheadReport, RoleTimes
from specdist.engine.times.timeline import PhaseTime
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import noisy_copy, tiny_model


def test_two_shards_that_share_passes_add_up_to_the_run() -> None:
    target = tiny_model("llama", seed=3)
    requests = [
        Request(row_id=row, sample_index=0, prompt_ids=prompt, shard=row // 4)
        for row, prompt in enumerate(prompts_of_lengths(5, 23, 40, 2, 11, 17, 33, 8))
    ]
    replica = Harness(
        target,
        noisy_copy(target, scale=0.06),
        settings=SamplingSettings(temperature=1.0),
        eos=[7],
        max_num_seqs=6,
    )
    completions = replica.generate(requests)
    shards = [replica.stats_recorder.close_shard(shard) for shard in range(2)]
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
    # In one process the draft works exactly while the target waits for it.
    assert 0 < total.draft_ns.draft + total.draft_ns.prefill <= total.target_ns.idle


def round_of(sequences: list[Sequence], opened: list[Sequence]) -> RoundPlan:
    return RoundPlan(
        decoding=sequences,
        draft_limits=[0] * len(sequences),
        chunks=[],
        opened=opened,
        suspended_slots=[],
        page_updates=PageUpdates.from_entries([]),
    )


def reply_of(num_passes: int, draft_ns: int) -> ProposalReply:
    nothing = np.zeros(0, np.int64)
    return ProposalReply(
        next_token_ids_R=nothing, num_drafted_R=nothing, candidate_ids_C=nothing,
        draft_probabilities_C=nothing, ahead=AheadReport.nothing(0),
        draft_pass_sizes_P=np.ones(num_passes, np.int64),
        times=RoleTimes(draft=draft_ns, prefill=5, transfer=3, idle=11),
    )  # fmt: skip


def test_the_fit_recovers_the_cost_of_each_pass() -> None:
    """Rows begin and end in different rounds; the time and passes of a row are those of its own rounds."""
    t_target, t_draft = 1000, 70
    stats_recorder = StatsRecorder()
    rows = [
        Sequence(
            request=Request(row_id=order, sample_index=0, prompt_ids=[1]), order=order, stream_key=order,
            max_length=9, token_ids=[1],
        )
        for order in range(5)
    ]  # fmt: skip
    first_and_last = [(0, 3), (2, 4), (2, 9), (5, 10), (6, 12)]
    for number in range(13):
        running = [row for row, (first, last) in zip(rows, first_and_last, strict=True)
                   if first <= number <= last]  # fmt: skip
        opened = [row for row, (first, _) in zip(rows, first_and_last, strict=True) if first == number]
        # Some rounds end before the target's pass.
        num_passes, has_target = 1 + number**2 % 5, number % 4 != 3
        stats_recorder.record_round(
            round_of(running, opened),
            target=TargetTimes(verify=t_target * has_target, prefill=13, idle=500, host=7),
            reply=reply_of(num_passes, t_draft * num_passes),
            num_pass_tokens=4 if has_target else 0,
            pass_time=PhaseTime(t_target, is_known=True) if has_target else None,
            target_peak_bytes=0,
        )
        for row, (_, last) in zip(rows, first_and_last, strict=True):
            if last == number:
                stats_recorder.record_completion(row)
    stats = stats_recorder.close_shard(0)
    assert stats.num_target_passes == 10 and stats.num_draft_passes == sum(1 + n**2 % 5 for n in range(13))
    fit = stats.cost_sums.fit()
    assert fit is not None and stats.cost_sums.num == 5
    assert fit["t_target_s"] == pytest.approx(t_target * 1e-9)
    assert fit["t_draft_s"] == pytest.approx(t_draft * 1e-9)
    assert fit["r_squared"] == pytest.approx(1)


def test_a_replicas_start_is_counted_once_with_its_first_token() -> None:
    began_ns = time.time_ns()
    stats_recorder = StatsRecorder(began_ns)
    ahead = AheadOutcome(0, is_hit=False, num_branches=0, num_lost_branch_tokens=0, is_caught=False)
    for shard in (3, 3, 4):
        request = Request(row_id=0, sample_index=0, prompt_ids=[1], shard=shard)
        block: Any = SimpleNamespace(sequence=SimpleNamespace(request=request), ahead=ahead)
        stats_recorder.record_next_token(block, is_reached=False, is_miss=False)
    shards = [stats_recorder.close_shard(shard) for shard in (3, 4)]
    assert [stats.num_starts for stats in shards] == [1, 0]
    assert 0 < shards[0].first_token_ns <= time.time_ns() - began_ns
    assert 0 < (shards[0].summary()["time_to_first_token_s"] or 0) < 60
