"""A rank of the sharded engine's test: ranks 0 and 1 share the target, and the draft runs on rank 0.

The folder holds the target. That a target in slices follows its distribution is tested in
``test_distribution.py``, in one process.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from specdist.data.stats.shard import Stats
from specdist.engine.messages.interfaces import Target
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_sharded
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import VOCAB_SIZE, tiny_model
from tests.ranks import join, leave

IDENTITY = [
    SamplingSettings(temperature=0.0),
    SamplingSettings(temperature=0.9, top_k=20, top_p=0.95),
    SamplingSettings(temperature=0.9, top_k=20, is_coupled=True),
]
NARROW = VOCAB_SIZE - 5


class ShardedReplica(Harness):
    """Both ranks construct it; rank 0 generates, and rank 1 follows."""

    def __init__(self, folder: str, target: PreTrainedModel, draft: PreTrainedModel, **options: Any) -> None:
        super().__init__(target, draft, **options)
        sliced = load_sharded(
            open_checkpoint("--target", folder),
            dtype=torch.float32,
            device=topology.device,
            group=group,
            vocab_size=self.vocab_size,
        )
        self.sliced = ModelRunner(sliced, topology.device)
        self.assembly.allocate(self.sliced)

    def target(self) -> Target:
        return self.assembly.sharded_target(self.sliced, group)

    def follow(self) -> None:
        self.assembly.serve_target(self.sliced, group)


def check(folder: str, target: PreTrainedModel, draft: PreTrainedModel, **options: Any) -> Stats | None:
    """On rank 0, the sharded target's tokens against those of the whole one."""
    replica = ShardedReplica(folder, target, draft, **options)
    if not topology.is_rank0:
        replica.follow()
        return None
    whole = Harness(target, draft, **options)
    expected = whole.generate(requests)
    assert [c.token_ids for c in replica.generate(requests)] == [c.token_ids for c in expected]
    assert all(max(c.token_ids) < replica.vocab_size for c in expected)
    return replica.stats_recorder.close_shard(0)


topology = join(tp_size=2)
group = dist.new_group([0, 1])
folder, recurrent_folder = sys.argv[1:]

target = tiny_model("llama", seed=3)
# It has fewer ids, so that the target's last ones are padding.
draft = tiny_model("llama", seed=4, vocab_size=NARROW)
prompts = [[token % NARROW for token in prompt] for prompt in prompts_of_lengths(5, 23, 40, 2)]
requests = requests_for(prompts, num_samples=2)
for settings in IDENTITY:
    check(folder, target, draft, settings=settings, eos=[7], max_new_tokens=12)
# Samples begin with copies of states, of which each rank has its heads'.
stats = check(recurrent_folder, tiny_model("qwen3_5_text", seed=3), draft, max_new_tokens=12)
assert stats is None or stats.num_shared_prompt_tokens == 4 + 20 + 36
leave()
