"""What rounds take beyond their passes, measured with rounds of the run's own engine.

On a CPU, and beside small models, the host's share is large: without it a policy would draft where plain
decoding is faster. Of a draft in the target's process whole rounds are timed. Of one on a rank of its own it
is requests, which cost more than their steps: both ranks' bookkeeping, the messages, and the sampling of next
tokens on the draft's side. The engine makes them with all options of the run; in the target's place no pass
is run.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdist.engine.assembly import Assembly
from specdist.engine.draft.channels import InProcess
from specdist.engine.messages.interfaces import Proposer, Target, VerifyInput
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.target.local_target import FullDistributions
from specdist.engine.times.reports import Traffic
from specdist.engine.times.timeline import Timeline, synchronized_ns
from specdist.job.costs.pass_times import Fits, always, tokens_of_text
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.runner import ModelRunner
from specdist.policies import FixedLength, Goodput, LengthPolicy
from specdist.policies.costs import CostModel, Curve
from specdist.policies.payoff import ALONE, RoundShape

NUM_REQUESTS = 7
# Of rounds, after so many others; fewer where the budget ends.
NUM_WARMUPS, NUM_ROUNDS = 2, 5
# Of every sequence without a text; and most draft steps in a round: ahead as many as fit beside a large
# model's pass, since a policy that is asked after each has work between any two.
PROMPT_IDS = [0, 0]
FIRST_TOKENS = len(PROMPT_IDS)
MOST_STEPS, MOST_ASYNCHRONOUS_STEPS = 4, 12
# Rows end, and others begin: rounds with all of them are so many of all at least, or there are too few.
LEAST_SHARE = 0.2
# A pass beside which any other costs nothing.
NOTHING, FREE, ENDLESS = Curve([1], [0]), Curve([1], [1]), Curve([1], [10**15])


class HostTimes(NamedTuple):
    """Nanoseconds over the number of sequences: of any round; what drafting adds to it, whatever the number
    of steps; and what each step adds, with the candidates that are verified."""

    round: Curve
    drafting: Curve
    step: Curve

    def added_to(self, costs: CostModel) -> CostModel:
        """The costs of passes with those of the host."""
        return dataclasses.replace(
            costs, draft=costs.draft.plus(self.step), message=self.round, synchronous=self.drafting
        )


NO_HOST = HostTimes(NOTHING, NOTHING, NOTHING)


class _Asked(NamedTuple):
    """A request: its sequences, when it was made, nanoseconds until all work for it is done, and the passes
    that are reported with the reply."""

    num_rows: int
    begin_ns: int
    ns: int
    pass_sizes: list[int]


class _TimedDraft:
    """A draft that notes what each request takes; it is not closed with an engine."""

    def __init__(self, draft: Proposer, device: torch.device) -> None:
        self._draft, self._device = draft, device
        self.asked: list[_Asked] = []

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        begin_ns = synchronized_ns(self._device)
        reply = self._draft.propose(request, clock)
        spent_ns = synchronized_ns(self._device) - begin_ns
        self.asked.append(_Asked(len(request.slots_R), begin_ns, spent_ns, reply.draft_pass_sizes_P.tolist()))
        return reply

    def close(self) -> None: ...


class _UniformTarget:
    """In the target's place: all tokens are as likely."""

    is_single_rank = True

    def __init__(self, assembly: Assembly, device: torch.device) -> None:
        self._settings, self._vocab_size = assembly.settings, assembly.vocab_size
        self.device, self.traffic = device, Traffic()

    def forward(self, updates: PageUpdates, verify_input: VerifyInput) -> FullDistributions:
        del updates
        logits_NV = torch.zeros(len(verify_input.logits_indices_N), self._vocab_size, device=self.device)
        return FullDistributions.of(logits_NV, self._settings, verify_input)

    def close(self) -> None: ...


def _run(
    assembly: Assembly,
    requests: Iterable[Request],
    draft: Proposer,
    device: torch.device,
    is_enough: Callable[[list[_Asked]], bool],
    *,
    target: Target | None = None,
) -> list[_Asked]:
    """The requests of the engine's rounds until ``is_enough`` of them. ``target``: by default no pass."""
    timed = _TimedDraft(draft, device)
    engine = assembly.engine(
        iter(requests),
        target=target or _UniformTarget(assembly, device),
        proposer=timed,
        stats_recorder=StatsRecorder(),
    )
    for _ in engine.run(lambda: is_enough(timed.asked)):
        pass
    return timed.asked


def _requests(max_new_tokens: int, prompts: Sequence[list[int]] = (PROMPT_IDS,)) -> Iterable[Request]:
    for row, prompt_ids in enumerate(itertools.cycle(prompts)):
        yield Request(row_id=row, sample_index=0, prompt_ids=prompt_ids, max_new_tokens=max_new_tokens)


def _asked(
    assembly: Assembly,
    draft: Proposer,
    device: torch.device,
    *,
    num_rows: int,
    num_candidates: int,
    num_ahead: int,
    num_rounds: int,
    fits: Fits = always,
) -> list[_Asked]:
    """The requests of so many rounds in which all ``num_rows`` sequences decode; fewer where they do not fit.
    Where sequences are too short for it, of those in which the most do."""
    assembly = _limited(assembly, num_rows, num_candidates, num_ahead)
    num_slots = assembly.scheduling.num_slots

    def is_enough(asked: list[_Asked]) -> bool:
        found = [each for each in asked if each.num_rows == num_slots]
        is_short = len(asked) * LEAST_SHARE > num_rounds
        return len(found) >= num_rounds or is_short or bool(found and not fits(found[-1].ns))

    room = max(1, assembly.scheduling.max_seq_len - len(PROMPT_IDS))
    asked = _run(assembly, _requests(room), draft, device, is_enough)
    most = max((each.num_rows for each in asked), default=0)
    return [each for each in asked if each.num_rows == most > 0]


def _limited(assembly: Assembly, num_rows: int, num_candidates: int, num_ahead: int = 0) -> Assembly:
    limits = dataclasses.replace(
        assembly.scheduling,
        max_num_seqs=num_rows,
        max_draft_tokens=num_candidates,
        num_ahead_tokens=num_ahead,
    )
    return dataclasses.replace(assembly, scheduling=limits)


def _measured(assembly: Assembly) -> Assembly:
    """For sequences whose tokens end none of them, and are not scored."""
    settings = dataclasses.replace(assembly.settings, num_logprobs=None, num_prompt_logprobs=None)
    stop_rules = StopRules(NO_TEXT, frozenset())
    return dataclasses.replace(assembly, settings=settings, stop_rules=stop_rules, chooser=None)


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
    """What synchronous and asynchronous rounds take on the draft's rank beyond their steps, and beyond a
    round without any, over the number of sequences; and what each step takes beyond its pass, over that of
    sequences and branches. Mostly it is the host's work: between two runs of steps, and for every token.

    Args:
        step_ns: nanoseconds of a step of so many sequences, of :data:`FIRST_TOKENS` tokens each.
        uses_features: the policy is asked after every token, as ``goodput`` is.
    """
    assembly = _measured(assembly)
    most = assembly.scheduling.max_draft_tokens
    num_steps = min(MOST_STEPS, most)
    num_ahead = min(MOST_ASYNCHRONOUS_STEPS, most)
    one, several = (RoundShape(num_ahead=1 + num, num_branches=num_branches) for num in (1, num_ahead))
    found: dict[int, list[int]] = {}
    for size in dict.fromkeys((num_rows, 1)):
        rounds_ns = []
        for each, num_now in ((ALONE, 0), (ALONE, num_steps), (one, 0), (several, 0)):
            # Of steps, as wide as they can be, in the fewest rounds.
            width = size * (1 + each.num_branches)
            passes_ns = (num_now + each.num_ahead) * step_ns(width)
            if not fits(3 * passes_ns):
                break
            rounds_ns.append(
                _beyond_steps_ns(assembly, runner, step_ns, size, each, num_now, uses_features, fits)
            )
        else:
            nothing, synchronous, short, long = rounds_ns
            each_ns = max(0.0, long - short) / max(1, num_ahead - 1)
            # In an asynchronous round a step draws what stands for a next token, before the others.
            beyond = [synchronous - nothing - num_steps * each_ns, short - nothing - 2 * each_ns, each_ns]
            found[size] = [max(0, round(ns)) for ns in beyond]
    sizes = sorted(found) or [1]
    beyond_SK = np.maximum.accumulate([found.get(size, [0, 0, 0]) for size in sizes])
    synchronous, asynchronous, steps = beyond_SK.T.tolist()
    widths = [size * (1 + num_branches) for size in sizes]
    return Curve(sizes, synchronous), Curve(sizes, asynchronous), Curve(widths, steps)


def _beyond_steps_ns(
    assembly: Assembly,
    runner: ModelRunner,
    step_ns: Callable[[int], float],
    num_rows: int,
    ahead: RoundShape,
    num_now: int,
    uses_features: bool,
    fits: Fits,
) -> float:
    """Nanoseconds of a round of this kind, without its steps."""
    policy: LengthPolicy = FixedLength(num_now or max(0, ahead.num_ahead - 1))
    if uses_features and policy.max_draft_tokens:
        # Beside so slow a target every token pays.
        costs = CostModel(ENDLESS, NOTHING)
        policy = Goodput(max_draft_tokens=policy.max_draft_tokens, costs=costs, is_coupled=True)
    # A model that runs on the host itself takes most of the time: little is to be known beside it.
    num_warmups, num_rounds = (NUM_WARMUPS, NUM_ROUNDS) if runner.is_asynchronous else (1, 2)
    asked = _asked(
        assembly,
        assembly.draft(InProcess(assembly.draft_worker(runner, policy, ahead=ahead))),
        runner.device,
        num_rows=num_rows,
        num_candidates=policy.max_draft_tokens,
        num_ahead=ahead.num_ahead,
        num_rounds=num_warmups + num_rounds,
        fits=fits,
    )
    # The passes ahead are those of the round before, which was the same. Others at work on this machine only
    # add to it.
    found = [each.ns - sum(map(step_ns, each.pass_sizes)) for each in asked]
    return min(found[min(num_warmups, len(found) - 1) :], default=0.0)


def message_curve(assembly: Assembly, draft: Proposer, device: torch.device, num_rows: int) -> Curve:
    """On rank 0: times over the number of sequences; :func:`answer_messages` runs on the draft's rank."""
    sizes = sorted({1, num_rows})
    times = []
    for size in sizes:
        asked = _asked(
            _measured(assembly),
            draft,
            device,
            num_rows=size,
            num_candidates=0,
            num_ahead=0,
            num_rounds=NUM_WARMUPS + NUM_REQUESTS,
        )
        found = [each.ns for each in asked]
        times.append(int(statistics.median(found[NUM_WARMUPS:] or found or [0])))
    draft.close()
    return Curve(sizes, np.maximum.accumulate(times).tolist())


def answer_messages(assembly: Assembly, runner: ModelRunner) -> None:
    """The draft's part of :func:`message_curve`."""
    # Neither drafts nor branches: no pass is run.
    assembly.serve_draft(runner, FixedLength(0), ahead=ALONE)


def host_times(
    assembly: Assembly,
    target: ModelRunner,
    draft: ModelRunner,
    costs: CostModel,
    num_rows: int,
    fits: Fits = always,
    text_ids: Sequence[int] = (),
) -> HostTimes:
    """Of rounds whose two models are both in this process; the contents of their caches are lost. Zeros where
    passes take so long that rounds do not fit: beside them the host hardly matters.

    Args:
        costs: of passes alone.
        num_rows: most sequences at a time.
        text_ids: see :func:`tokens_of_text`.
    """
    # For sequences without options.
    settings = dataclasses.replace(assembly.settings, processing=None)
    assembly = dataclasses.replace(
        _measured(assembly), settings=settings, ahead=ALONE, masker=None, is_traced=False
    )
    most = min(MOST_STEPS, assembly.scheduling.max_draft_tokens)
    found: dict[int, list[float]] = {}
    for size in dict.fromkeys((num_rows, 1)):
        beyond = {
            steps: _beyond_passes_ns(assembly, target, draft, costs, size, steps, fits, text_ids)
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
    text_ids: Sequence[int],
) -> float | None:
    """Nanoseconds of a round of so many sequences and draft steps, without its passes; None where no round
    could be measured."""
    context = float(len(PROMPT_IDS))
    target_ns = float(costs.target_ns(num_rows * (1 + num_steps), num_rows, context))
    passes_ns = target_ns + num_steps * float(costs.draft_ns(num_rows, context))
    if not fits((NUM_WARMUPS + 1) * passes_ns):
        return None
    num_rounds = NUM_WARMUPS + NUM_ROUNDS
    assembly = _limited(assembly, num_rows, max(1, num_steps))
    # Always all steps, or none.
    pace = CostModel(ENDLESS, FREE) if num_steps else CostModel(FREE, ENDLESS)
    policy = Goodput(
        max_draft_tokens=max(1, num_steps), costs=pace, is_coupled=not assembly.settings.is_random
    )

    def is_enough(asked: list[_Asked]) -> bool:
        num_timed = len(asked) - 1
        return num_timed >= num_rounds or (num_timed > NUM_WARMUPS and not fits(passes_ns))

    limit = min(assembly.scheduling.max_seq_len - len(PROMPT_IDS), (num_rounds + 2) * (num_steps + 1))
    prompts = tokens_of_text(text_ids, [len(PROMPT_IDS)] * num_rows).reshape(num_rows, -1).tolist()
    asked = _run(
        assembly,
        itertools.islice(_requests(limit, prompts), num_rows),
        assembly.local_draft(draft, policy),
        target.device,
        is_enough,
        target=assembly.local_target(target),
    )
    rounds_ns = [
        later.begin_ns - each.begin_ns
        for each, later in itertools.pairwise(asked[NUM_WARMUPS:])
        if each.num_rows == later.num_rows == num_rows
    ]
    return max(0.0, min(rounds_ns) - passes_ns) if rounds_ns else None
