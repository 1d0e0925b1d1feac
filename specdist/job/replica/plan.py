"""A replica as every rank knows it before its models are loaded: what follows from the options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from specdist.config.generate import GenerateConfig
from specdist.engine.assembly import Assembly
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.stopping import StopRules
from specdist.job.costs.allocation import BatchLimits, CacheRoom
from specdist.job.models.model_plan import ModelPlan, batch_limits
from specdist.job.ranks.topology import Topology
from specdist.job.run.workload import Workload
from specdist.job.texts.processing import sampling_settings
from specdist.policies import LengthPolicy
from specdist.policies.costs import BRANCH_COUNTS, CostModel
from specdist.policies.payoff import (
    ALONE,
    ASSUMED_ACCEPTANCE,
    Learned,
    RoundChooser,
    RoundShape,
)
from specdist.policies.registry import build_policy, needs_costs
from specdist.sampling.distributions import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What rounds are like: whose costs decide them, and the limits of their batch.

    ``ahead``: what the draft does while the target verifies; with a ``chooser`` the most of it.
    """

    policy: LengthPolicy
    scheduling: SchedulerSettings
    ahead: RoundShape = ALONE
    chooser: RoundChooser | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """What every rank of a replica knows of it before its models are loaded.

    Attributes:
        workload: what the prompts promise, as far as it is known; the same on every rank.
        num_halvings: how often the batch was halved because memory ran out.
        num_seqs: sequences at a time, as memory has room for; None before that is known.
        most_draft_tokens: of a sequence in a pass, that its caches have room for; None before that is known.
        may_give_back: only an engine runs the target, so that its windowed layers may hold what they see.
    """

    config: GenerateConfig
    models: ModelPlan
    topology: Topology
    workload: Workload = field(default_factory=Workload)
    num_halvings: int = 0
    num_seqs: int | None = None
    most_draft_tokens: int | None = None
    may_give_back: bool = True

    @cached_property
    def settings(self) -> SamplingSettings:
        return sampling_settings(self.config, self.models.target, self.models.vocab_size)

    @cached_property
    def scheduling(self) -> SchedulerSettings:
        """Limits of a batch whose draft does not work ahead."""
        limits = batch_limits(
            self.config,
            self.models,
            self.topology.device.type,
            num_halvings=self.num_halvings,
            num_seqs=self.num_seqs,
        )
        most = limits.max_draft_tokens
        return dataclasses.replace(limits, max_draft_tokens=min(most, self.most_draft_tokens or most))

    @property
    def is_asynchronous(self) -> bool:
        """Whether rounds in which the draft works ahead are possible."""
        may = self.config.is_asynchronous or self.config.chooses_rounds
        return may and self.topology.has_draft_rank

    @property
    def needs_costs(self) -> bool:
        return self.is_asynchronous or needs_costs(self.config.policy)

    @property
    def branch_counts(self) -> tuple[int, ...]:
        """Numbers of branches per sequence to choose from."""
        asked = self.config.num_branches
        return BRANCH_COUNTS if asked is None else (asked,)

    @property
    def limits(self) -> BatchLimits:
        """The batch's limits, with the branches in this rank's cache, and the most tokens of each. For a
        draft that works ahead it is the most that the costs, which are not measured yet, may ask for."""
        num_branches, max_tokens = 0, 0
        if self.topology.holds_draft and self.models.draft is not None and self.is_asynchronous:
            num_branches = self.scheduling.num_slots * max(self.branch_counts)
            max_tokens = self.scheduling.max_draft_tokens + 1
        return BatchLimits(
            scheduling=self.scheduling,
            num_branch_slots=num_branches,
            max_branch_tokens=max_tokens,
            is_asynchronous=self.is_asynchronous,
        )

    def advice(self, costs: CostModel | None) -> str | None:
        """A warning, by these costs, where a GPU of the draft's own earns less than it would elsewhere."""
        if costs is None or not self.is_asynchronous or self.topology.device.type != "cuda":
            return None
        num_rows, ranks = self.workload.rows_at_a_time(self.scheduling.num_slots), self.topology.tp_size
        gain = drafting_gain(
            costs,
            num_rows=num_rows,
            max_draft_tokens=self.config.policy_choice.max_draft_tokens,
            acceptance=ASSUMED_ACCEPTANCE,
            branch_counts=self.branch_counts,
        )
        if gain * ranks >= ranks + 1:
            return None
        return (
            f"the draft's own GPU will hardly be used: {num_rows} sequences at a time and an acceptance of "
            f"{ASSUMED_ACCEPTANCE:g} promise {gain:.2f} times the target's tokens/s alone, for "
            f"{(ranks + 1) / ranks:.2f} times its GPUs: launch with --num_processes {ranks}, which puts the "
            "draft on the target's rank 0, or leave --draft out"
        )

    def rounds(self, costs: CostModel | None) -> Rounds:
        """``costs``: measured, if they are needed."""
        config, choice = self.config, self.config.policy_choice
        policy = build_policy(choice, costs, is_coupled=config.is_coupled)
        if not self.is_asynchronous:
            return Rounds(policy=policy, scheduling=self.scheduling)
        assert costs is not None
        most, chooser = policy.max_draft_tokens, None
        if config.is_asynchronous:
            # With --overlap asynchronous the same in all rounds, so that a restart repeats every block. Not
            # of the batch that memory has room for: block lengths must not depend on that.
            most_slots = batch_limits(config, self.models, self.topology.device.type).num_slots
            ahead = plan_asynchronous(
                costs,
                num_rows=self.workload.rows_at_a_time(most_slots),
                max_draft_tokens=most,
                num_branches=config.num_branches,
                acceptance=ASSUMED_ACCEPTANCE,
            )
        else:
            ahead = RoundShape(num_ahead=most + 1, num_branches=max(self.branch_counts))
            chooser = RoundChooser(
                costs,
                max_draft_tokens=most,
                fixed_length=choice.first_length if choice.policy == "fixed" else None,
                branch_counts=self.branch_counts,
            )
        # The tokens of a block, or ahead, that a constraint may force on top of those that are drawn.
        num_forced = self.scheduling.max_draft_tokens - choice.max_draft_tokens
        scheduling = dataclasses.replace(self.scheduling, num_ahead_tokens=ahead.num_ahead + num_forced)
        return Rounds(policy=policy, scheduling=scheduling, ahead=ahead, chooser=chooser)

    def assembly(
        self,
        room: CacheRoom,
        rounds: Rounds | None = None,
        stop_rules: StopRules | None = None,
    ) -> Assembly:
        """The assembly of this rank's models. ``stop_rules``: by default the target's stop tokens. Without
        ``rounds`` it only allocates and measures."""
        config, models = self.config, self.models
        return Assembly(
            settings=self.settings,
            vocab_size=models.vocab_size,
            stop_rules=stop_rules or StopRules(NO_TEXT, models.target.stop_token_ids()),
            scheduling=self.scheduling if rounds is None else rounds.scheduling,
            num_pages=room.num_pages,
            windowed=room.windowed,
            ahead=ALONE if rounds is None else rounds.ahead,
            chooser=None if rounds is None else rounds.chooser,
            is_traced=config.is_traced,
            trusts_draft=not config.is_exact,
            masker=models.constraints.new_masker(models.vocab_size),
        )


def plan_asynchronous(
    costs: CostModel,
    *,
    num_rows: int,
    max_draft_tokens: int,
    num_branches: int | None,
    acceptance: float,
) -> RoundShape:
    """The same work ahead in every round, with the most expected tokens per second when ``num_rows``
    sequences run, after contexts at which costs were measured, and tokens are accepted with this probability;
    one token and the fewest branches where decoding alone is faster.

    The first token ahead stands for a next token, the others are candidates. ``num_branches`` None chooses
    their number by the costs.
    """
    counts = BRANCH_COUNTS if num_branches is None else (num_branches,)
    chooser = RoundChooser(costs, max_draft_tokens=max_draft_tokens, branch_counts=counts)
    rates_S = chooser.rates_of(num_rows, costs.context.num_tokens, Learned(acceptance, acceptance))
    best = 2 + int(rates_S[2:].argmax())
    if rates_S[best] <= rates_S[0]:
        return RoundShape(num_ahead=1, num_branches=counts[0])
    return chooser.shapes[best]


def drafting_gain(
    costs: CostModel,
    *,
    num_rows: int,
    max_draft_tokens: int,
    acceptance: float,
    branch_counts: Sequence[int] = BRANCH_COUNTS,
) -> float:
    """Expected tokens per second of the best rounds with a draft over those without one, as in
    :func:`plan_asynchronous`; at least 1."""
    chooser = RoundChooser(costs, max_draft_tokens=max_draft_tokens, branch_counts=branch_counts)
    rates_S = chooser.rates_of(num_rows, costs.context.num_tokens, Learned(acceptance, acceptance))
    return float(rates_S.max() / rates_S[0])
