"""A rank of the world that runs cases on real ranks: two for the target, and the third for the draft.

It takes case after case from a folder, until the folder is gone. Rank 0 generates and writes what was found.
"""

import json
import sys
import time
from pathlib import Path
from typing import cast

import torch.distributed as dist

from specdist.engine.draft.channels import ToRank
from specdist.engine.draft.client import Draft
from specdist.engine.messages.interfaces import Proposer, Target
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.vocab_parallel import vocab_ranges
from tests.engine.markov import MarkovModel, MarkovRunner
from tests.random_runs.case import Case, from_line
from tests.random_runs.models import pair_of
from tests.random_runs.running import LocalReplica
from tests.random_runs.trial import attempt
from tests.random_runs.world import POLL_S, write
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


def next_case(number: int) -> Case | None:
    path = folder / f"{number}.case"
    while not path.exists():
        if not folder.exists():
            return None
        time.sleep(POLL_S)
    return from_line(path.read_text())


topology = join(TP_SIZE)
group = dist.new_group(list(range(TP_SIZE)))
folder = Path(sys.argv[1])
number = 0
while (case := next_case(number)) is not None:
    replica = ReplicaOfRanks(case)
    if topology.is_rank0:
        found = attempt(case, replica)
        write(folder / f"{number}.found", json.dumps(vars(found)))
    else:
        replica.serve()
    number += 1
leave()
