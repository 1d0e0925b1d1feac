"""Measures what the passes of a replica cost, as the run's first prior; real rounds correct it
(:mod:`specdist.job.costs.corrections`).

It takes at most :data:`BUDGET_S`; only two sizes of passes of each model are timed whatever they take. No
batch is larger than the run's rows can fill. What the host and messages take beside passes is assumed here:
see :data:`OWN_RANK` and :data:`ONE_PROCESS`; of one process :mod:`specdist.job.costs.rehearsal` measures it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from specdist.data.stats.regression import NS_PER_S
from specdist.engine.assembly import Assembly
from specdist.engine.target.sharded_target import RANK_ZERO
from specdist.job.costs.pass_times import (
    Budget,
    Fits,
    PassTimer,
    PassTimes,
    context_slopes,
    draw_from_logits,
    verify_logits,
)
from specdist.job.ranks.topology import Topology, broadcast_from_rank0, gathered
from specdist.job.run.workload import Workload
from specdist.models.drafters.runner import DrafterRunner
from specdist.models.passes.runner import ModelRunner
from specdist.policies.costs import ContextCosts, CostModel, Curve
from specdist.sampling.branch_estimates import DraftDraws

logger = logging.getLogger(__name__)

# What may be spent in all: see the module's docstring.
BUDGET_S = 5.0
# The share up to which the target's passes may go, and its passes after more context; and of what is left
# then, the draft's steps.
TARGET_SHARE, TARGET_SLOPES_SHARE = 0.45, 0.6
DRAFT_SHARE, DRAFT_SLOPES_SHARE = 0.5, 0.6
# Tokens of a prompt that the draft runs, on a host and on a device, which it keeps busy; and how often.
PROMPT_TOKENS, NUM_PROMPTS = (64, 512), 2
NOTHING = Curve([1], [0])


class HostTimes(NamedTuple):
    """Nanoseconds that the host takes beside passes, whatever the number of sequences: of any round that
    asks the draft; and what synchronous and asynchronous drafting take beyond their steps."""

    message: int
    synchronous: int
    asynchronous: int

    def added_to(self, costs: CostModel) -> CostModel:
        """The costs of passes with those of the host."""
        curve = costs.synchronous
        return replace(
            costs,
            message=Curve([1], [self.message]),
            synchronous=replace(curve, ns=[ns + self.synchronous for ns in curve.ns]),
            asynchronous=Curve([1], [self.asynchronous]),
        )


# Two cores of a server took so long for a message (jobs/benchmarks/tables/host-times.md), which decides how
# often the draft is asked, and twice as long for drafting: with a draft on a rank of its own, where a round
# has a request and its reply, and in one process, where it is the engine's own work. In emulated time, with
# targets of 1B and 8B and 1 to 96 sequences, a run that assumes half of all is on average as fast as one that
# knows (0.99 to 1.02). One that assumes nothing has 0.94 to 1.01 of that rate, and one that assumes twice as
# much 0.88 to 1.
OWN_RANK = HostTimes(300_000, 300_000, 1_000_000)
ONE_PROCESS = HostTimes(250_000, 250_000, 0)


class ModelTimes(NamedTuple):
    """Passes over their size; what context adds for every sequence, and for every token. Of a draft whose
    blocks are one pass, also what that takes beyond its steps, over the number of sequences, and what context
    adds to it for each; and of a draft that may put off prompts, a token of one."""

    passes: Curve
    slopes: tuple[float, float]
    synchronous: Curve = NOTHING
    block_row_ns: float = 0.0
    prefill_ns: float = 0.0


NO_DRAFT = ModelTimes(NOTHING, (0.0, 0.0))


def measure_costs(
    assembly: Assembly,
    topology: Topology,
    workload: Workload,
    *,
    target: ModelRunner | None,
    draft: ModelRunner | None,
    group: dist.ProcessGroup | None,
    num_branch_slots: int,
    uses_features: bool,
    begin: Callable[[str], None] = lambda phase: None,
) -> CostModel:
    """Measured by target and draft, one after the other; of the target's ranks, rank 0's times count. All
    ranks must call it at the same time.

    Measured at the same time they would slow each other down where they share a memory, more than in a run.

    Args:
        target, draft: the models on this rank.
        group: the ranks that share the target, if there are several.
        uses_features: a draft step includes the features of its tokens.
        begin: is called with every phase.
    """
    of_target = of_draft = None
    budget = Budget(BUDGET_S * NS_PER_S)
    begin("measuring passes of the target")
    if target is not None:
        of_target = measure_target(assembly, target, group, workload=workload, budget=budget)
    left_ns = broadcast_from_rank0(topology, budget.left_ns)
    if draft is not None:
        begin("measuring steps of the draft")
        of_draft = measure_draft(
            assembly,
            draft,
            num_branch_slots=num_branch_slots,
            uses_features=uses_features,
            may_put_off=not topology.has_draft_rank,
            budget=Budget(left_ns),
            workload=workload,
        )
    everywhere = gathered(topology, (of_target, of_draft))
    of_target = everywhere[RANK_ZERO][0]
    of_draft = everywhere[topology.draft_rank][1] if topology.uses_draft else None
    assert of_target is not None
    costs = combined_costs(
        of_target,
        of_draft or NO_DRAFT,
        context_of(assembly, workload)[0],
        workload.rows_at_a_time(assembly.scheduling.num_slots),
    )
    if of_draft is not None:
        costs = (OWN_RANK if topology.has_draft_rank else ONE_PROCESS).added_to(costs)
    if topology.is_rank0:
        sizes = f"{len(costs.target.sizes)} sizes up to {max(costs.target.sizes)} tokens"
        logger.info("%s; in %.1f s at %s", costs_text(costs), budget.spent_ns / NS_PER_S, sizes)
    return costs


def costs_text(costs: CostModel | None, *, are_kept: bool = False) -> str:
    """What is known of times before the first round, and from where, for people."""
    if costs is None:
        return "not needed: no decision of this run depends on times"
    rows, is_assumed = costs.context.num_rows, {OWN_RANK.message, ONE_PROCESS.message} & {*costs.message.ns}
    step = f", a draft step {float(costs.draft(rows)) / 1e6:,.1f} ms" if any(costs.draft.ns) else ""
    known = f"a pass of {rows} tokens takes {float(costs.target(rows)) / 1e6:,.1f} ms{step}"
    known += "; the host's share is assumed" if is_assumed else ""
    return f"{'kept from an earlier start' if are_kept else 'measured'}: {known}"


def context_of(assembly: Assembly, workload: Workload) -> tuple[int, int]:
    """The context of the measured passes, and the longest possible one."""
    room = max(0, assembly.scheduling.max_seq_len - assembly.scheduling.max_draft_tokens - 1)
    return min(workload.num_context_tokens, room), room


def measure_target(
    assembly: Assembly,
    target: ModelRunner,
    group: dist.ProcessGroup | None,
    *,
    workload: Workload,
    budget: Budget,
) -> ModelTimes | None:
    """Measure the target on all its ranks at the same time; None on all but rank 0, which decides what is
    timed."""
    work = partial(verify_logits, settings=assembly.settings, vocab_size=assembly.vocab_size)
    timer = PassTimer(target, work, group, workload.text_ids)
    if group is not None and dist.get_rank(group):
        timer.follow()
        return None
    per_row = 1 + assembly.scheduling.max_draft_tokens
    num_rows = workload.rows_at_a_time(assembly.scheduling.num_slots)
    found = timed_model(
        timer,
        num_rows=num_rows,
        num_tokens_per_row=per_row,
        largest=max(num_rows, min(num_rows * per_row, assembly.scheduling.most_block_tokens)),
        contexts=context_of(assembly, workload),
        fits=budget.until(TARGET_SHARE),
        slopes_fit=budget.until(TARGET_SLOPES_SHARE),
        prepares=timer.is_asynchronous,
    )
    timer.close()
    return found


def timed_model(
    timer: Callable[[int, int, int], int],
    *,
    num_rows: int,
    num_tokens_per_row: int,
    largest: int,
    contexts: tuple[int, int],
    fits: Fits,
    slopes_fit: Fits,
    prepares: bool,
    most_rows: int | None = None,
) -> ModelTimes:
    """Passes over up to ``largest`` tokens, and what context adds to them; see :class:`PassTimes`.

    Args:
        contexts: of the measured passes, and the longest possible one.
        fits, slopes_fit: until when passes may be timed, and others after more context.
    """
    context, room = contexts
    times = PassTimes(
        timer,
        num_rows=num_rows,
        largest=largest,
        most_rows=most_rows,
        num_context_tokens=context,
        prepares=prepares,
    )
    times.timed(fits)
    slopes = context_slopes(
        timer,
        times.curve(),
        slopes_fit,
        num_rows=num_rows,
        num_tokens_per_row=num_tokens_per_row,
        num_context_tokens=context,
        max_context_tokens=room,
    )
    return ModelTimes(times.curve(), slopes)


def measure_draft(
    assembly: Assembly,
    draft: ModelRunner,
    *,
    num_branch_slots: int,
    workload: Workload,
    uses_features: bool,
    may_put_off: bool,
    budget: Budget,
) -> ModelTimes:
    """Measure the draft, on its rank. ``may_put_off``: it may run prompts only when it drafts after them."""
    num_slots = assembly.scheduling.num_slots
    num_rows = workload.rows_at_a_time(num_slots)
    contexts = context_of(assembly, workload)
    draws = DraftDraws(
        settings=assembly.settings,
        vocab_size=assembly.vocab_size,
        keeps_scores=False,
        keeps_features=uses_features,
    )
    work = partial(draw_from_logits, draws=draws)
    timer = PassTimer(draft, work, text_ids=workload.text_ids)
    # Branches are rows, too.
    widest = num_rows + num_rows * num_branch_slots // num_slots
    found = timed_model(
        timer,
        num_rows=num_rows,
        num_tokens_per_row=1,
        largest=widest,
        most_rows=widest,
        contexts=contexts,
        fits=budget.until(DRAFT_SHARE),
        slopes_fit=budget.until(DRAFT_SLOPES_SHARE),
        prepares=timer.is_asynchronous,
    )
    if not isinstance(draft, DrafterRunner) and may_put_off:
        num_tokens = min(PROMPT_TOKENS[timer.is_asynchronous], assembly.scheduling.max_seq_len - 1)
        prompt_ns = float(found.passes(num_tokens))
        if budget.until(1.0)(NUM_PROMPTS * prompt_ns):
            prompt_ns = min(timer.prompt_ns(num_tokens) for _ in range(NUM_PROMPTS))
        return found._replace(prefill_ns=prompt_ns / num_tokens)
    if not isinstance(draft, DrafterRunner) or draft.blocks is None:
        return found
    timer(widest, widest, contexts[0])
    goes_on = PassTimer(draft, work, text_ids=workload.text_ids, goes_on=True)
    steps = PassTimes(goes_on, num_rows=num_rows, largest=widest, num_context_tokens=contexts[0])
    return of_blocks(found, steps.timed(budget.until(1.0)).curve())


def of_blocks(blocks: ModelTimes, steps: Curve) -> ModelTimes:
    """The times of a drafter whose blocks are one pass, in a round's first step: what that takes more than a
    step that only draws is beyond the steps, whatever their number. Steps read no context."""
    sizes, row_ns = blocks.passes.sizes, blocks.slopes[0]
    beyond = np.maximum(0, np.asarray(blocks.passes.ns) - steps(np.asarray(sizes))).astype(int)
    beyond_steps = Curve(sizes, beyond.tolist())
    return ModelTimes(steps, (0.0, 0.0), beyond_steps, block_row_ns=row_ns)


def combined_costs(
    of_target: ModelTimes, of_draft: ModelTimes, num_context_tokens: int, num_rows: int
) -> CostModel:
    """Costs of passes, measured after so many tokens of context, with at most so many sequences."""
    row_ns, token_ns = of_target.slopes
    return CostModel(
        of_target.passes,
        of_draft.passes,
        ContextCosts(
            num_context_tokens,
            num_rows,
            row_ns,
            token_ns,
            of_draft.slopes[0],
            of_draft.block_row_ns,
            of_draft.prefill_ns,
        ),
        synchronous=of_draft.synchronous,
    )
