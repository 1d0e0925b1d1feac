"""Measures what the rounds of a replica cost: passes of every size, context, and asking the draft.

A request to a draft on a rank of its own costs more than its steps: both ranks' bookkeeping, the messages,
and the sampling of next tokens on the draft's side. It is measured with requests by the run's own code.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch
import torch.distributed as dist

from specdist.cache.pages import PageUpdates
from specdist.engine.assembly import Assembly
from specdist.engine.collectives import RANK_ZERO
from specdist.engine.device_clock import synchronized_ns
from specdist.engine.draft_ahead import DraftAhead
from specdist.engine.interfaces import Proposer
from specdist.engine.opened import OpenedSequences
from specdist.engine.proposals import DRAW, ProposalRequest
from specdist.engine.remote import RemoteDraft, serve_drafts
from specdist.engine.timeline import Timeline
from specdist.job.costs import context_slopes, draft_curve, draft_work, target_curve, target_work
from specdist.job.topology import Topology
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner
from specdist.policies import FixedLength
from specdist.policies.costs import ContextCosts, CostModel, Curve
from specdist.sampling.distributions import Dense

TARGET_GROUP = 0
# Over the size of a pass; and what context adds for every sequence, and for every token.
PassTimes = tuple[Curve, tuple[float, float]]
NUM_REQUESTS = 7
NUM_WARMUPS = 2


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
            assembly, draft, num_branch_slots=num_branch_slots, uses_features=uses_features, **lengths
        )
    message = Curve([1], [0])
    if asks_draft:
        if topology.is_rank0:
            remote = RemoteDraft(topology.draft_rank, group=TARGET_GROUP, device=topology.device)
            message = message_curve(assembly, remote, topology.device)
        elif draft is not None:
            answer_messages(assembly, draft)
    everywhere = [(found, message)] * topology.world_size
    if dist.is_initialized():
        dist.all_gather_object(everywhere, (found, message))
    of_target, of_draft_rank = everywhere[RANK_ZERO][0][0], everywhere[topology.draft_rank][0][1]
    assert of_target is not None and of_draft_rank is not None
    return combined_costs(
        of_target,
        of_draft_rank,
        everywhere[RANK_ZERO][1],
        context_of(assembly, num_context_tokens, max_seq_len)[0],
        assembly.scheduling.num_slots,
    )


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
        "num_tokens_per_row": batch.max_draft_tokens + 1,
        "num_context_tokens": context,
    }
    curve = target_curve(target, settings, vocab_size, **sizes)
    work = target_work(settings, vocab_size)
    return curve, context_slopes(target, work, **sizes, max_context_tokens=room)


def measure_draft(
    assembly: Assembly,
    draft: ModelRunner,
    *,
    num_branch_slots: int,
    num_context_tokens: int,
    max_seq_len: int,
    uses_features: bool,
) -> PassTimes:
    """On the draft's rank."""
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
    return curve, context_slopes(draft, work, num_rows=num_rows, **sizes, max_context_tokens=room)


def combined_costs(
    of_target: PassTimes, of_draft: PassTimes, message: Curve, num_context_tokens: int, num_rows: int
) -> CostModel:
    """Measured after so many tokens of context, with at most so many sequences."""
    (target_ns, (row_ns, token_ns)), (draft_ns, (draft_row_ns, _)) = of_target, of_draft
    return CostModel(
        target_ns,
        draft_ns,
        ContextCosts(num_context_tokens, num_rows, row_ns, token_ns, draft_row_ns),
        message,
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
