"""The books of a run: they agree with its completions, and no nanosecond is counted twice."""

import dataclasses

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
