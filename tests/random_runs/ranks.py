"""A rank of the world that runs cases on real ranks: two for the target, and the third for the draft.

The arguments are a file, into which rank 0 writes what was found, and the names of the cases.
"""

import json
import sys
from pathlib import Path
from typing import cast

import torch.distributed as dist

from specdist.engine.draft.client import Draft, ToRank
from specdist.engine.messages.interfaces import Proposer, Target
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.vocab_parallel import vocab_ranges
from tests.engine.markov import MarkovModel, MarkovRunner
from tests.random_runs.drawing import case_of
from tests.random_runs.models import pair_of
from tests.random_runs.running import LocalReplica
from tests.random_runs.trial import attempt
from tests.ranks import join, leave

TP_SIZE, DRAFT_RANK = 2, 2


class ReplicaOfRanks(LocalReplica):
    """Every rank constructs it; rank 0 generates, and the others serve it."""

    def target(self) -> Target:
        if self.case.tp_size == 1:
            return super().target()
        return self.assembly.sharded_target(self._runner(), group)

    def proposer(self) -> Proposer:
        if not self.case.has_draft_rank:
            return super().proposer()
        return Draft(ToRank(DRAFT_RANK), max_missed_tokens=20)

    def serve(self) -> None:
        if topology.rank == DRAFT_RANK and self.case.has_draft_rank:
            self.assembly.serve_draft(self.runners[1], self.policy)
        elif topology.rank != DRAFT_RANK and self.case.tp_size > 1:
            self.assembly.serve_target(self._runner(), group)

    def _runner(self) -> ModelRunner:
        ids = vocab_ranges(self.vocab_size, TP_SIZE)[topology.rank]
        runner = cast(ModelRunner, MarkovRunner(cast(MarkovModel, pair_of(self.case)[0]), ids=ids))
        self.assembly.allocate(runner)
        return runner


topology = join(TP_SIZE)
group = dist.new_group(list(range(TP_SIZE)))
output, *names = sys.argv[1:]
found = []
for name in names:
    replica = ReplicaOfRanks(case_of(name))
    if topology.is_rank0:
        found.append(attempt(replica.case, replica))
        # The other ranks still wait for the end of this case.
        assert not found[-1].is_broken, f"{name}: {found[-1].wrong}"
    else:
        replica.serve()
if topology.is_rank0:
    Path(output).write_text(json.dumps([vars(each) for each in found]), encoding="utf-8")
leave()
