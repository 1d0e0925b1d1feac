"""A rank of the test of twenty combinations of options: ranks 0 and 1 share the target, the draft is rank 2.

What a rank sends is real; the models are tables. Synchronous, asynchronous, with branches, one after the
other."""

import numpy as np
import torch
import torch.distributed as dist

from specdist.engine.draft.client import ToRank
from specdist.engine.messages.interfaces import Proposer, Target
from specdist.sampling.constraints.constraint import Constraint
from specdist.sampling.vocab_parallel import vocab_ranges
from tests.engine.combinations import NUM_COMBINATIONS, combination
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import VOCAB_SIZE, MarkovRunner
from tests.engine.sampled import ALARM, PROMPTS
from tests.engine.test_processing import AHEAD, TARGET, processed_replica, uniform_p_value
from tests.ranks import join, leave
from tests.sampling.constraints.letters import END, letters_masker

TP_SIZE, DRAFT_RANK = 2, 2


class ReplicaOfRanks(Harness):
    """Every rank constructs it; rank 0 generates, and the others serve it."""

    def target(self) -> Target:
        return self.assembly.sharded_target(self._runner(), group)

    def proposer(self) -> Proposer:
        return self.assembly.draft(ToRank(DRAFT_RANK))

    def serve(self) -> None:
        if topology.rank == DRAFT_RANK:
            self.assembly.serve_draft(self.runners[1], self.policy)
        else:
            self.assembly.serve_target(self._runner(), group)

    def _runner(self) -> MarkovRunner:
        runner = MarkovRunner(TARGET, ids=vocab_ranges(VOCAB_SIZE, TP_SIZE)[topology.rank])
        self.assembly.allocate(runner)
        return runner


topology = join(TP_SIZE)
group = dist.new_group(list(range(TP_SIZE)))
p_values = []
for seed in range(NUM_COMBINATIONS):
    chosen = combination(seed)
    masks = {} if chosen.grammar is None else {"masker": letters_masker, "forced_room": 4}
    replica = processed_replica(
        chosen.settings(), kind=ReplicaOfRanks, eos=[END], **masks, **AHEAD[seed % len(AHEAD)]
    )
    assert isinstance(replica, ReplicaOfRanks)
    if not topology.is_rank0:
        replica.serve()
        continue
    completions = replica.generate(chosen.requests(requests_for(PROMPTS, 12)))
    grammar = chosen.grammar and Constraint("regex", chosen.grammar).grammar
    p_values.append(uniform_p_value(completions, chosen.processing, grammar=grammar))
    stats = replica.stats_recorder.close_shard(0)
    assert 0.05 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.98
if topology.is_rank0:
    assert min(p_values) > ALARM, p_values
    # Fisher's sum is chi-squared with two degrees of freedom each: a small bias of all shows here.
    fisher = float(-2 * np.log(p_values).sum())
    assert torch.special.gammaincc(torch.tensor(float(NUM_COMBINATIONS)), torch.tensor(fisher / 2)) > ALARM
leave()
