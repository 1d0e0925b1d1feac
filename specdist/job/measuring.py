"""Measures what the rounds of a replica cost: passes of every size, context, and asking the draft.

A request to a draft on a rank of its own costs more than its steps: both ranks' bookkeeping, the messages,
and the sampling of next tokens on the draft's side. It is measured with requests by the run's own code. So is
what the draft's host takes beyond the steps of a round.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from specdist.cache.pages import PageUpdates
from specdist.engine.assembly import Assembly
from specdist.engine.collectives import RANK_ZERO
from specdist.engine.device_clock import synchronized_ns
from specdist.engine.draft_ahead import DraftAhead
from specdist.engine.interfaces import Proposer
from specdist.engine.opened import NO_CONTEXT, OpenedSequences
from specdist.engine.proposals import DRAW, ProposalRequest
from specdist.engine.remote import RemoteDraft, serve_drafts
from specdist.engine.timeline import Timeline
from specdist.job.costs import context_slopes, draft_curve, draft_work, target_curve, target_work
from specdist.job.host_times import host_times
from specdist.job.topology import Topology
from specdist.models.eagle_runner import EagleRunner
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner
from specdist.policies import FixedLength, Goodput, LengthPolicy
from specdist.policies.costs import ContextCosts, CostModel, Curve
from specdist.sampling.distributions import Dense

TARGET_GROUP = 0
NUM_REQUESTS = 7
NUM_WARMUPS = 2
# Tokens of the sequences of a request; rounds of every kind, and most draft steps in one: ahead as many as
# fit beside a large model's pass, since a policy that is asked after each has work between any two.
FIRST_TOKENS = 2
NUM_ROUNDS = 5
MOST_STEPS, MOST_STEPS_AHEAD = 4, 12
# Without a draft model: of each sequence's blocks, and of all, the passes that are measured.
MEASURED_BLOCK, MEASURED_TOKENS = 8, 256
NOTHING = Curve([1], [0])


class PassTimes(NamedTuple):
    """Over the size of a pass; what context adds for every sequence, and for every token. Of the draft also
    what rounds in turns and ahead take beyond their steps, over the number of sequences."""

    passes: Curve
    slopes: tuple[float, float]
    turns: Curve = NOTHING
    ahead: Curve = NOTHING


NO_DRAFT = PassTimes(NOTHING, (0.0, 0.0))


def measure_costs(
    assembly: Assembly,
    topology: Topology,
    *,
    target: ModelRunner | None,
    draft: ModelRunner | None,
    num_branch_slots: int,
    num_context_tokens: int,
    max_seq_len: int,
    uses_features: bool,
    asks_draft: bool,
) -> CostModel:
    """Measured by target and draft, one after the other; of the target's ranks, rank 0's times count. All
    ranks must call it at the same time.

    Measured at the same time they would slow each other down where they share a memory, more than in a run.

    Args:
        target, draft: the models on this rank.
        num_context_tokens: typical number of tokens before a pass.
        uses_features: a draft step includes the features of its tokens.
        asks_draft: measure requests to the draft's rank too.
    """
    lengths = {"num_context_tokens": num_context_tokens, "max_seq_len": max_seq_len}
    found: list[PassTimes | None] = [None, None]
    if target is not None:
        found[0] = measure_target(assembly, target, **lengths)
    if dist.is_initialized():
        dist.barrier()
    if draft is not None:
        found[1] = measure_draft(
            assembly,
            draft,
            num_branch_slots=num_branch_slots,
            uses_features=uses_features,
            chooses_rounds=asks_draft,
            **lengths,
        )
    message = NOTHING
    if asks_draft:
        if topology.is_rank0:
            remote = RemoteDraft(topology.draft_rank, group=TARGET_GROUP, device=topology.device)
            message = message_curve(assembly, remote, topology.device)
        elif draft is not None:
            answer_messages(assembly, draft)
    everywhere = [(found, message)] * topology.world_size
    if dist.is_initialized():
        dist.all_gather_object(everywhere, (found, message))
    of_target, of_draft_rank = everywhere[RANK_ZERO][0][0], NO_DRAFT
    if topology.uses_draft:
        of_draft_rank = everywhere[topology.draft_rank][0][1] or NO_DRAFT
    assert of_target is not None
    costs = combined_costs(
        of_target,
        of_draft_rank,
        everywhere[RANK_ZERO][1],
        context_of(assembly, num_context_tokens, max_seq_len)[0],
        assembly.scheduling.num_slots,
    )
    # Not of a draft that reads the target's states, which nobody sends it here.
    if target is None or draft is None or topology.world_size > 1 or isinstance(draft, EagleRunner):
        return costs
    return host_times(assembly, target, draft, costs).added_to(costs)


def _measured_block(assembly: Assembly) -> int:
    """Candidates of every sequence in the largest measured pass. The time of longer blocks, from memory,
    follows from that."""
    batch = assembly.scheduling
    if assembly.memory is None:
        return batch.max_draft_tokens
    return min(batch.max_draft_tokens, max(MEASURED_BLOCK, MEASURED_TOKENS // batch.num_slots))


def context_of(assembly: Assembly, num_context_tokens: int, max_seq_len: int) -> tuple[int, int]:
    """The context of the measured passes, and the longest possible one."""
    room = max(0, max_seq_len - assembly.scheduling.max_draft_tokens - 1)
    return min(num_context_tokens, room), room


def measure_target(
    assembly: Assembly, target: ModelRunner, *, num_context_tokens: int, max_seq_len: int
) -> PassTimes:
    """On all ranks of the target at the same time."""
    settings, vocab_size, batch = assembly.settings, assembly.vocab_size, assembly.scheduling
    context, room = context_of(assembly, num_context_tokens, max_seq_len)
    sizes = {
        "num_rows": batch.num_slots,
        "num_tokens_per_row": 1 + _measured_block(assembly),
        "num_context_tokens": context,
    }
    curve = target_curve(target, settings, vocab_size, **sizes)
    work = target_work(settings, vocab_size)
    return PassTimes(curve, context_slopes(target, work, **sizes, max_context_tokens=room))


def measure_draft(
    assembly: Assembly,
    draft: ModelRunner,
    *,
    num_branch_slots: int,
    num_context_tokens: int,
    max_seq_len: int,
    uses_features: bool,
    chooses_rounds: bool = False,
) -> PassTimes:
    """On the draft's rank. ``chooses_rounds``: measure the host's time in rounds, too."""
    settings, vocab_size, num_rows = assembly.settings, assembly.vocab_size, assembly.scheduling.num_slots
    context, room = context_of(assembly, num_context_tokens, max_seq_len)
    sizes = {"num_tokens_per_row": 1, "num_context_tokens": context}
    curve = draft_curve(
        draft,
        settings,
        vocab_size,
        uses_features=uses_features,
        num_rows=num_rows + num_branch_slots,
        **sizes,
    )
    work = draft_work(settings, vocab_size, uses_features=uses_features)
    slopes = context_slopes(draft, work, num_rows=num_rows, **sizes, max_context_tokens=room)
    times = PassTimes(curve, slopes)
    if not chooses_rounds:
        return times
    costs = combined_costs(times, times, NOTHING, context, num_rows)
    turns, ahead, step = drafting_curves(
        assembly,
        draft,
        lambda size: float(costs.draft_ns(size, FIRST_TOKENS)),
        num_branches=num_branch_slots // num_rows,
        uses_features=uses_features,
    )
    return times._replace(passes=curve.plus(step), turns=turns, ahead=ahead)


def drafting_curves(
    assembly: Assembly,
    runner: ModelRunner,
    step_ns: Callable[[int], float],
    *,
    num_branches: int,
    uses_features: bool,
) -> tuple[Curve, Curve, Curve]:
    """What rounds in turns and ahead take on the draft's rank beyond their steps, and beyond a round without
    any, over the number of sequences; and what each step takes beyond its pass, over that of sequences and
    branches. Mostly it is the host's work: between two runs of steps, and for every token.

    Args:
        step_ns: nanoseconds of a step of so many sequences, of :data:`FIRST_TOKENS` tokens each.
        uses_features: the policy is asked after every token, as ``goodput`` is.
    """
    # Rows' own options are left out: the rows of this measurement have none.
    settings = dataclasses.replace(assembly.settings, processing=None)
    assembly = dataclasses.replace(assembly, settings=settings)
    most = assembly.scheduling.max_draft_tokens
    num_steps = min(MOST_STEPS, most)
    num_ahead = min(MOST_STEPS_AHEAD, most)
    one, several = (DraftAhead(num_tokens=1 + num, num_branches=num_branches) for num in (1, num_ahead))
    sizes = sorted({1, assembly.scheduling.num_slots})
    found = []
    for size in sizes:
        nothing, in_turns, short, long = (
            _beyond_steps_ns(assembly, runner, step_ns, size, each, num_now, uses_features)
            for each, num_now in ((DraftAhead(), 0), (DraftAhead(), num_steps), (one, 0), (several, 0))
        )
        each_ns = max(0.0, long - short) / max(1, num_ahead - 1)
        # Ahead a step draws what stands for a next token, before the others.
        beyond = [in_turns - nothing - num_steps * each_ns, short - nothing - 2 * each_ns, each_ns]
        found.append([max(0, round(ns)) for ns in beyond])
    turns, with_ahead, steps = np.maximum.accumulate(found).T.tolist()
    widths = [size * (1 + num_branches) for size in sizes]
    return Curve(sizes, turns), Curve(sizes, with_ahead), Curve(widths, steps)


def _beyond_steps_ns(
    assembly: Assembly,
    runner: ModelRunner,
    step_ns: Callable[[int], float],
    num_rows: int,
    ahead: DraftAhead,
    num_now: int,
    uses_features: bool,
) -> float:
    """Nanoseconds of a round of this kind, without its steps."""
    policy: LengthPolicy = FixedLength(num_now or max(0, ahead.num_tokens - 1))
    if uses_features and policy.max_draft_tokens:
        # Beside so slow a target every token pays.
        costs = CostModel(Curve([1], [10**15]), NOTHING)
        policy = Goodput(max_draft_tokens=policy.max_draft_tokens, costs=costs, is_coupled=True)
    worker = assembly.draft_worker(runner, policy, ahead=ahead)
    request = _request(assembly, num_rows, runner.device)
    slots_R = request.slots_R
    request = dataclasses.replace(
        request,
        draft_now_R=np.full(num_rows, num_now),
        opened=OpenedSequences(
            slots=slots_R,
            stream_keys=slots_R,
            num_misses=0 * slots_R,
            context_lengths=np.full(num_rows, NO_CONTEXT),
            max_lengths=np.full(num_rows, assembly.scheduling.max_seq_len),
        ),
    )
    # A model that runs on the host itself takes most of the time: little is to be known beside it.
    num_warmups, num_rounds = (NUM_WARMUPS, NUM_ROUNDS) if runner.is_asynchronous else (1, 2)
    found = []
    for _ in range(num_warmups + num_rounds):
        begin_ns = synchronized_ns(runner.device)
        reply = worker.respond(request)
        worker.prefill_and_draft_ahead(request)
        spent_ns = synchronized_ns(runner.device) - begin_ns
        # Of the work ahead of the round before, which was the same.
        found.append(spent_ns - sum(step_ns(size) for size in reply.draft_pass_sizes_P.tolist()))
    # Others at work on this machine only add to it.
    return min(found[num_warmups:])


def combined_costs(
    of_target: PassTimes, of_draft: PassTimes, message: Curve, num_context_tokens: int, num_rows: int
) -> CostModel:
    """Measured after so many tokens of context, with at most so many sequences."""
    row_ns, token_ns = of_target.slopes
    return CostModel(
        of_target.passes,
        of_draft.passes,
        ContextCosts(num_context_tokens, num_rows, row_ns, token_ns, of_draft.slopes[0]),
        message,
        of_draft.turns,
        of_draft.ahead,
    )


def message_curve(assembly: Assembly, draft: Proposer, device: torch.device) -> Curve:
    """On rank 0: times over the number of sequences; :func:`answer_messages` runs on the draft's rank."""
    clock = Timeline("host")
    num_rows = assembly.scheduling.num_slots
    sizes = sorted({1, -(-num_rows // 2), num_rows})
    times = []
    for size in sizes:
        request, found = _request(assembly, size, device), []
        for _ in range(NUM_WARMUPS + NUM_REQUESTS):
            begin_ns = synchronized_ns(device)
            draft.propose(request, clock)
            found.append(synchronized_ns(device) - begin_ns)
        times.append(int(statistics.median(found[NUM_WARMUPS:])))
    draft.close()
    return Curve(sizes, np.maximum.accumulate(times).tolist())


def answer_messages(assembly: Assembly, runner: ModelRunner) -> None:
    """The draft's part of :func:`message_curve`."""
    clock = Timeline("transfer")
    # Neither drafts nor branches: no pass is run.
    worker = assembly.draft_worker(runner, FixedLength(0), clock, ahead=DraftAhead())
    serve_drafts({TARGET_GROUP: worker}, RANK_ZERO, vocab_size=assembly.vocab_size, clock=clock)


def _request(assembly: Assembly, num_rows: int, device: torch.device) -> ProposalRequest:
    """Of sequences of two tokens, whose second is sampled; the first was sampled without the draft."""
    slots_R, zeros_R = np.arange(num_rows), np.zeros(num_rows, np.int64)
    is_drawn = assembly.settings.is_random
    distributions = None
    if is_drawn:
        vocab_size = assembly.vocab_size
        distributions = Dense(torch.full((num_rows, vocab_size), 1 / vocab_size, device=device))
    return ProposalRequest(
        page_updates=PageUpdates.from_entries([]),
        slots_R=slots_R,
        num_accepted_R=zeros_R,
        next_token_ids_R=np.full(num_rows, DRAW) if is_drawn else zeros_R,
        draft_now_R=zeros_R,
        num_redraft_R=zeros_R,
        next_distributions_W=distributions,
        suspended_slots=zeros_R[:0],
        opened=OpenedSequences.of([]),
        context=FlatBatch(zeros_R[:0], zeros_R[:0], zeros_R[:0]),
        missed=FlatBatch(zeros_R, slots_R, zeros_R),
    )
