"""What the host takes beside passes, measured by rounds that nobody keeps: a few of the engine's own, of a
replica of one process, before its first row.

Rounds without a draft, with one draft token of each sequence and with a few tell apart what any round takes,
what drafting takes, and what each of its steps does. A step is more than a pass: between two the draft's
policy is asked, and the caches of a CPU hold another model.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any, NamedTuple

import numpy as np

from specdist.config.generate import GenerateConfig
from specdist.data.stats.regression import NS_PER_S
from specdist.engine.assembly import Assembly
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.job.costs.pass_times import tokens_of_text
from specdist.job.run.workload import Workload
from specdist.models.drafters.runner import DrafterRunner
from specdist.models.passes.runner import ModelRunner
from specdist.policies import DraftSequences
from specdist.policies.costs import CostModel, Curve
from specdist.policies.lengths.goodput import Goodput

# Draft tokens of each sequence in the rounds that are compared; rounds of each, after the first ones, which
# run contexts; and the time that all may take.
LENGTHS = (0, 1, 3)
NUM_ROUNDS, NUM_FIRST = 10, 3
MOST_S = 1.5
PROMPT_TOKENS = 8

logger = logging.getLogger(__name__)


class RehearsedLengths(Goodput):
    """Goodput that is asked as ever, and whose answer does not count: blocks have ``length`` tokens."""

    length = 0

    def wants(self, rows: DraftSequences) -> np.ndarray:
        super().wants(rows)
        is_over = rows.num_drafted >= self.length
        return np.full(len(rows.slots_R), self.length if is_over else self.max_draft_tokens)


class _Round(NamedTuple):
    ended_ns: int
    num_rows: int
    num_tokens: int
    draft_sizes: list[int]


class _Recorder(StatsRecorder):
    """Keeps what rounds have run, and when that was recorded: during the pass of the next round."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[_Round] = []

    def record_round(self, plan: Any, *, reply: Any, num_pass_tokens: int, **times: Any) -> None:
        sizes = reply.draft_pass_sizes_P.tolist()
        self.rounds.append(_Round(time.perf_counter_ns(), len(plan.decoding), num_pass_tokens, sizes))
        super().record_round(plan, reply=reply, num_pass_tokens=num_pass_tokens, **times)

    def is_full(self) -> bool:
        return len(self.rounds) > NUM_FIRST + NUM_ROUNDS


def rehearsed_costs(
    costs: CostModel,
    assembly: Assembly,
    target: ModelRunner,
    draft: ModelRunner,
    workload: Workload,
    config: GenerateConfig,
) -> CostModel:
    """The costs with measured times of the host in the place of assumed ones. The same costs where rounds
    take too long to be rehearsed, beside which the host's time is nothing; of a block drafter, whose steps
    are of two kinds; and where logits are processed, since a mask ends sequences.

    ``costs``: of passes, with what is assumed of the host.
    """
    max_draft_tokens = config.policy_choice.max_draft_tokens
    num_rows = workload.rows_at_a_time(assembly.scheduling.num_slots)
    round_ns = sum(costs.target(num_rows * (1 + each)) + each * costs.draft(num_rows) for each in LENGTHS)
    takes_too_long = (NUM_FIRST + NUM_ROUNDS) * float(round_ns) > MOST_S * NS_PER_S
    is_other = assembly.settings.processing is not None or isinstance(draft, DrafterRunner)
    if takes_too_long or is_other or max_draft_tokens < max(LENGTHS):
        return costs
    assembly, found = dataclasses.replace(assembly, stop_rules=StopRules(NO_TEXT, frozenset())), []
    for length in LENGTHS:
        policy = RehearsedLengths(
            max_draft_tokens=max_draft_tokens, costs=costs, is_coupled=config.is_coupled
        )
        policy.length, recorder = length, _Recorder()
        engine = assembly.engine(
            iter(_requests(num_rows, length, workload.text_ids)),
            target=assembly.local_target(target),
            proposer=assembly.local_draft(draft, policy),
            stats_recorder=recorder,
        )
        for _ in engine.run(recorder.is_full):
            pass
        if (each := _beyond_passes(costs, recorder.rounds, num_rows, length)) is None:
            return costs
        found.append(each)
    (alone_ns, _), (one_ns, one_step), (more_ns, more_steps) = found
    message_ns = max(0.0, alone_ns)
    step_ns = max(0.0, (more_ns - one_ns) / max(1.0, more_steps - one_step))
    beyond_steps_ns = max(0.0, one_ns - message_ns - step_ns * one_step)
    logger.info(
        "beside passes a round takes %.2f ms, drafting %.2f ms and each of its steps %.2f ms: measured in "
        "rounds that are not kept",
        *(ns / 1e6 for ns in (message_ns, beyond_steps_ns, step_ns)),
    )
    return dataclasses.replace(
        costs,
        message=Curve([1], [round(message_ns)]),
        synchronous=Curve([1], [round(beyond_steps_ns)]),
        draft=Curve(costs.draft.sizes, [round(ns + step_ns) for ns in costs.draft.ns]),
    )


def _requests(num_rows: int, length: int, text_ids: tuple[int, ...]) -> list[Request]:
    """Rows that go on for all rounds, whether blocks are accepted or not."""
    prompts = tokens_of_text(text_ids, [PROMPT_TOKENS] * num_rows).reshape(num_rows, -1).tolist()
    most = (NUM_ROUNDS + NUM_FIRST + 2) * (1 + length)
    return [
        Request(row_id=row, sample_index=0, prompt_ids=prompt, max_new_tokens=most)
        for row, prompt in enumerate(prompts)
    ]


def _beyond_passes(
    costs: CostModel, rounds: list[_Round], num_rows: int, length: int
) -> tuple[float, int] | None:
    """Of the fastest round of all rows with such blocks, as of passes, the nanoseconds beyond these, and the
    number of draft steps; None if there was none."""
    found, rounds = [], rounds[NUM_FIRST:]
    # A round is recorded in the next one's pass: between two records lies the work of the round after them.
    for before, after, this in zip(rounds, rounds[1:], rounds[2:], strict=False):
        if this.num_rows == num_rows and bool(this.draft_sizes) == bool(length):
            passes_ns = float(costs.target_ns(this.num_tokens, num_rows, PROMPT_TOKENS))
            passes_ns += sum(costs.draft_ns(size, PROMPT_TOKENS) for size in this.draft_sizes)
            found.append((after.ended_ns - before.ended_ns - passes_ns, len(this.draft_sizes)))
    return min(found, default=None)
