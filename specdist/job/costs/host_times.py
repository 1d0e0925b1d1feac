"""What rounds take beyond their passes where the draft is in the target's process.

It is measured with rounds of the run's own engine. On a CPU, and beside small models, the host's share is
large: without it a policy would draft where plain decoding is faster. A draft on a rank of its own measures
its host with requests: see :mod:`specdist.job.costs.measuring`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdist.engine.assembly import Assembly
from specdist.engine.interfaces import Proposer
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.request import Request
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.times.stats_recorder import StatsRecorder
from specdist.engine.times.timeline import Timeline, synchronized_ns
from specdist.job.costs.pass_times import Fits, always
from specdist.models.passes.runner import ModelRunner
from specdist.policies import Goodput
from specdist.policies.costs import CostModel, Curve
from specdist.policies.payoff import ALONE

MOST_STEPS = 4
# Of rounds, after so many others; fewer where the budget ends.
NUM_WARMUPS, NUM_ROUNDS = 2, 5
PROMPT_IDS = [0, 0]
# A pass beside which any other costs nothing.
ENDLESS = Curve([1], [10**15])
NOTHING = Curve([1], [1])


class HostTimes(NamedTuple):
    """Nanoseconds over the number of sequences: of any round; what drafting adds to it, whatever the number
    of steps; and what each step adds, with the candidates that are verified."""

    round: Curve
    drafting: Curve
    step: Curve

    def added_to(self, costs: CostModel) -> CostModel:
        """The costs of passes with those of the host."""
        return dataclasses.replace(
            costs, draft=costs.draft.plus(self.step), message=self.round, turns=self.drafting
        )


NO_HOST = HostTimes(*[Curve([1], [0])] * 3)


class _TimedDraft:
    """A draft that notes when it is asked, and for how many sequences."""

    def __init__(self, draft: Proposer, now_ns: Callable[[], int]) -> None:
        self._draft = draft
        self._now_ns = now_ns
        self.asked: list[tuple[int, int]] = []

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        self.asked.append((self._now_ns(), len(request.slots_R)))
        return self._draft.propose(request, clock)

    def close(self) -> None:
        self._draft.close()


def host_times(
    assembly: Assembly,
    target: ModelRunner,
    draft: ModelRunner,
    costs: CostModel,
    num_rows: int,
    fits: Fits = always,
) -> HostTimes:
    """Both models are in this process; the contents of their caches are lost. Zeros where passes take so long
    that rounds do not fit: beside them the host hardly matters.

    Args:
        costs: of passes alone.
        num_rows: most sequences at a time.
    """
    most = min(MOST_STEPS, assembly.scheduling.max_draft_tokens)
    found: dict[int, list[float]] = {}
    for size in dict.fromkeys((num_rows, 1)):
        beyond = {
            steps: _beyond_passes_ns(assembly, target, draft, costs, size, steps, fits)
            for steps in dict.fromkeys((0, most, 1))
        }
        none, one, several = (beyond[steps] for steps in (0, 1, most))
        if none is not None and one is not None and several is not None:
            step = max(0.0, several - one) / max(1, most - 1)
            found[size] = [none, max(0.0, one - step - none), step]
    if not found:
        return NO_HOST
    sizes = sorted(found)
    ascending = np.maximum.accumulate(np.rint([found[size] for size in sizes]).astype(int)).T.tolist()
    return HostTimes(*(Curve(sizes, ns) for ns in ascending))


def _beyond_passes_ns(
    assembly: Assembly,
    target: ModelRunner,
    draft: ModelRunner,
    costs: CostModel,
    num_rows: int,
    num_steps: int,
    fits: Fits,
) -> float | None:
    """Nanoseconds of a round of so many sequences and draft steps, without its passes; None where no round
    could be measured."""
    context = float(len(PROMPT_IDS))
    target_ns = float(costs.target_ns(num_rows * (1 + num_steps), num_rows, context))
    passes_ns = target_ns + num_steps * float(costs.draft_ns(num_rows, context))
    if not fits((NUM_WARMUPS + 1) * passes_ns):
        return None
    num_rounds = NUM_WARMUPS + NUM_ROUNDS
    assembly = _plain(assembly, num_rows, num_steps)
    # Always all steps, or none.
    pace = CostModel(ENDLESS, NOTHING) if num_steps else CostModel(NOTHING, ENDLESS)
    policy = Goodput(
        max_draft_tokens=max(1, num_steps), costs=pace, is_coupled=not assembly.settings.is_random
    )
    timed = _TimedDraft(assembly.local_draft(draft, policy), lambda: synchronized_ns(target.device))
    limit = min(assembly.scheduling.max_seq_len - len(PROMPT_IDS), (num_rounds + 2) * (num_steps + 1))
    requests = (
        Request(row_id=row, sample_index=0, prompt_ids=PROMPT_IDS, max_new_tokens=limit)
        for row in range(num_rows)
    )
    engine = assembly.engine(
        requests, target=assembly.local_target(target), proposer=timed, stats_recorder=StatsRecorder()
    )

    def is_enough() -> bool:
        num_timed = len(timed.asked) - 1
        return num_timed >= num_rounds or (num_timed > NUM_WARMUPS and not fits(passes_ns))

    for _ in engine.run(is_enough):
        pass
    rounds_ns = [
        end_ns - begin_ns
        for (begin_ns, rows), (end_ns, later_rows) in itertools.pairwise(timed.asked[NUM_WARMUPS:])
        if rows == later_rows == num_rows
    ]
    return max(0.0, min(rounds_ns) - passes_ns) if rounds_ns else None


def _plain(assembly: Assembly, num_rows: int, num_steps: int) -> Assembly:
    """For sequences without options, whose tokens end none of them."""
    scheduling = dataclasses.replace(
        assembly.scheduling, max_num_seqs=num_rows, max_draft_tokens=max(1, num_steps), num_ahead_tokens=0
    )
    return dataclasses.replace(
        assembly,
        settings=dataclasses.replace(
            assembly.settings, processing=None, num_logprobs=None, num_prompt_logprobs=None
        ),
        stop_rules=StopRules(NO_TEXT, frozenset()),
        scheduling=scheduling,
        ahead=ALONE,
        chooser=None,
        masker=None,
        memory=None,
        is_traced=False,
    )
