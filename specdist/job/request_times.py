"""Measures what requests to a draft on a rank of its own cost, with requests by the run's own code.

A request costs more than its steps: both ranks' bookkeeping, the messages, and the sampling of next tokens on
the draft's side. So does what the draft's host takes beyond the steps of a round.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import numpy as np
import torch

from specdist.cache.pages import PageUpdates
from specdist.engine.assembly import Assembly
from specdist.engine.collectives import RANK_ZERO
from specdist.engine.device_clock import synchronized_ns
from specdist.engine.draft_ahead import DraftAhead
from specdist.engine.interfaces import Proposer
from specdist.engine.opened import NO_CONTEXT, OpenedSequences
from specdist.engine.proposals import DRAW, ProposalRequest
from specdist.engine.remote import serve_drafts
from specdist.engine.timeline import Timeline
from specdist.job.pass_times import Fits
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner
from specdist.policies import FixedLength, Goodput, LengthPolicy
from specdist.policies.costs import CostModel, Curve
from specdist.sampling.distributions import Dense

TARGET_GROUP = 0
NUM_REQUESTS = 7
NUM_WARMUPS = 2
# Tokens of the sequences of a request; rounds of every kind, and most draft steps in one: ahead as many as
# fit beside a large model's pass, since a policy that is asked after each has work between any two.
FIRST_TOKENS = 2
NUM_ROUNDS = 5
MOST_STEPS, MOST_STEPS_AHEAD = 4, 12
NOTHING = Curve([1], [0])


def drafting_curves(
    assembly: Assembly,
    runner: ModelRunner,
    step_ns: Callable[[int], float],
    *,
    num_rows: int,
    num_branches: int,
    uses_features: bool,
    fits: Fits,
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
    found: dict[int, list[int]] = {}
    for size in dict.fromkeys((num_rows, 1)):
        rounds_ns = []
        for each, num_now in ((DraftAhead(), 0), (DraftAhead(), num_steps), (one, 0), (several, 0)):
            # Of steps, as wide as they can be, in the fewest rounds.
            width = size * (1 + each.num_branches)
            passes_ns = (num_now + each.num_tokens) * step_ns(width)
            if not fits(3 * passes_ns):
                break
            rounds_ns.append(
                _beyond_steps_ns(assembly, runner, step_ns, size, each, num_now, uses_features, fits)
            )
        else:
            nothing, in_turns, short, long = rounds_ns
            each_ns = max(0.0, long - short) / max(1, num_ahead - 1)
            # Ahead a step draws what stands for a next token, before the others.
            beyond = [in_turns - nothing - num_steps * each_ns, short - nothing - 2 * each_ns, each_ns]
            found[size] = [max(0, round(ns)) for ns in beyond]
    sizes = sorted(found) or [1]
    beyond_SK = np.maximum.accumulate([found.get(size, [0, 0, 0]) for size in sizes])
    turns, with_ahead, steps = beyond_SK.T.tolist()
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
    fits: Fits,
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
        if len(found) > num_warmups and not fits(spent_ns):
            break
    # Others at work on this machine only add to it.
    return min(found[num_warmups:])


def message_curve(assembly: Assembly, draft: Proposer, device: torch.device, num_rows: int) -> Curve:
    """On rank 0: times over the number of sequences; :func:`answer_messages` runs on the draft's rank."""
    clock = Timeline("host")
    sizes = sorted({1, num_rows})
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
