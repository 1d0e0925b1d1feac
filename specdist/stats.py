"""Where the tokens and the time went. Integers only, so that shards add up exactly and survive JSON.

Names follow vLLM's speculative decoding metrics. Times are nanoseconds of wall clock: each role's own add up
to the wall time of the rounds that it served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
NS_PER_S = 1_000_000_000
# Two regressors are told apart if the squared sine of the angle between them exceeds this.
INDEPENDENT = 1e-3


@dataclass
class TargetTimes:
    """Nanoseconds of the target's side: waiting for the draft is idle, everything on the host is ``host``."""

    prefill: int = 0
    verify: int = 0
    transfer: int = 0
    idle: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.verify + self.transfer + self.idle + self.host


@dataclass
class DraftTimes:
    """Nanoseconds of the draft's side: waiting for the target is idle."""

    prefill: int = 0
    draft: int = 0
    transfer: int = 0
    idle: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.draft + self.transfer + self.idle


@dataclass
class CostSums:
    """Sums for the least-squares fit T = t_draft N_draft + t_target N_target over completions (SpecDec++ §2).

    From a completion's first round to its last, T is the time that both models spent drafting and verifying
    (prompts aside), N the passes of each.
    """

    num: int = 0
    t: int = 0
    tt: int = 0
    dd: int = 0
    dv: int = 0
    vv: int = 0
    dt: int = 0
    vt: int = 0

    def observe(self, *, time_ns: int, num_draft_passes: int, num_target_passes: int) -> None:
        self.num += 1
        self.t += time_ns
        self.tt += time_ns * time_ns
        self.dd += num_draft_passes * num_draft_passes
        self.dv += num_draft_passes * num_target_passes
        self.vv += num_target_passes * num_target_passes
        self.dt += num_draft_passes * time_ns
        self.vt += num_target_passes * time_ns

    def fit(self) -> dict[str, float] | None:
        """``t_draft_s``, ``t_target_s`` and R²; None where the passes do not tell the two apart.

        With a fixed draft length N_draft is almost a multiple of N_target, and the solution is arbitrary.
        """
        determinant = self.dd * self.vv - self.dv**2
        if self.num < 3 or determinant <= INDEPENDENT * self.dd * self.vv:
            return None
        t_draft = (self.dt * self.vv - self.vt * self.dv) / determinant
        t_target = (self.vt * self.dd - self.dt * self.dv) / determinant
        return self._result(t_draft, t_target) if min(t_draft, t_target) >= 0 else None

    def explained_by(self, t_draft_ns: float, t_target_ns: float) -> dict[str, float] | None:
        """R² of given costs per pass, such as those measured directly."""
        return self._result(t_draft_ns, t_target_ns) if self.num >= 3 else None

    def _result(self, t_draft: float, t_target: float) -> dict[str, float] | None:
        total = self.tt - self.t**2 / self.num
        if total <= 0:
            return None
        unexplained = (
            self.tt
            - 2 * (t_draft * self.dt + t_target * self.vt)
            + t_draft**2 * self.dd
            + 2 * t_draft * t_target * self.dv
            + t_target**2 * self.vv
        )
        return {
            "t_draft_s": t_draft / NS_PER_S,
            "t_target_s": t_target / NS_PER_S,
            "r_squared": 1 - unexplained / total,
        }


@dataclass
class PeakMemory:
    """Most bytes held by one rank of a role; the only field that merges as a maximum."""

    target: int = 0
    draft: int = 0


@dataclass(frozen=True)
class AheadOutcome:
    """What a row had prepared for a decision, and what became of it.

    Attributes:
        num_tokens: drafted ahead; ``is_hit``: the first was the decision, and the others are candidates.
        num_branches: prepared for a miss; ``branch_rank``: the rank of the alternative, from 1, whose branch
            has become the candidates, or 0.
        num_lost_branch_tokens: drafted in the other branches.
    """

    num_tokens: int
    is_hit: bool
    num_branches: int
    num_lost_branch_tokens: int
    branch_rank: int


@dataclass
class Stats:
    """Statistics of a shard, or the sum of several.

    ``num_drafts`` counts target passes of a row with at least one candidate; lists are indexed by draft
    position, or by length. Discarded = drafted - accepted. With draft-ahead, chains are row-rounds with
    tokens drafted ahead of the candidates, judged those whose candidates were all accepted, hits those whose
    first token ahead was the decision; ``num_ahead_tokens`` counts that token, or a lost chain as a whole.
    Misses are decisions that dropped a chain; ``num_branch_hits_per_rank`` of them found a branch prepared,
    by the rank of its first token among the alternatives there; ``num_branch_tokens`` counts the lost ones.
    Messages travel between the target's lead and the draft, target messages among the target's ranks.
    """

    num_rows: int = 0
    num_completions: int = 0
    num_error_rows: int = 0
    num_prompt_tokens: int = 0
    num_shared_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_target_passes: int = 0
    num_draft_passes: int = 0
    num_row_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    num_rounds: int = 0
    num_messages: int = 0
    num_message_bytes: int = 0
    num_target_messages: int = 0
    num_target_message_bytes: int = 0
    num_ahead_chains: int = 0
    num_ahead_judged: int = 0
    num_ahead_hits: int = 0
    num_ahead_tokens: int = 0
    num_misses: int = 0
    num_branches: int = 0
    num_branch_tokens: int = 0
    num_branch_hits_per_rank: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    draft_length_histogram: list[int] = field(default_factory=list)
    accepted_length_histogram: list[int] = field(default_factory=list)
    wall_ns: int = 0
    target_ns: TargetTimes = field(default_factory=TargetTimes)
    draft_ns: DraftTimes = field(default_factory=DraftTimes)
    cost_sums: CostSums = field(default_factory=CostSums)
    peak_memory_bytes: PeakMemory = field(default_factory=PeakMemory)

    def observe_ahead(self, outcome: AheadOutcome, *, is_reached: bool, is_miss: bool) -> None:
        """A row's tokens drafted ahead have met their decision; those that become candidates count as such.

        ``is_reached``: all candidates before them were accepted, so the first of them was judged.
        ``is_miss``: the decision has dropped a chain.
        """
        self.num_misses += is_miss
        self.num_branches += outcome.num_branches
        self.num_branch_tokens += outcome.num_lost_branch_tokens
        if outcome.branch_rank:
            _add_to(self.num_branch_hits_per_rank, outcome.branch_rank - 1, 1)
        if outcome.num_tokens == 0:
            return
        self.num_ahead_chains += 1
        self.num_ahead_judged += is_reached
        self.num_ahead_hits += outcome.is_hit
        self.num_ahead_tokens += 1 if outcome.is_hit else outcome.num_tokens

    def observe_block(self, *, num_drafted: int, num_accepted: int) -> None:
        """One row's verified block."""
        self.num_row_steps += 1
        if num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        _add_to(self.draft_length_histogram, num_drafted, 1)
        _add_to(self.accepted_length_histogram, num_accepted, 1)
        for position in range(num_accepted):
            _add_to(self.num_accepted_tokens_per_pos, position, 1)

    def add(self, other: Stats) -> None:
        """Merge another shard's into this one."""
        _merge(self, other)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Stats:
        nested = {
            "target_ns": TargetTimes,
            "draft_ns": DraftTimes,
            "cost_sums": CostSums,
            "peak_memory_bytes": PeakMemory,
        }
        known = {item.name for item in dataclasses.fields(Stats)}
        return Stats(
            **{
                name: nested[name](**value) if name in nested else value
                for name, value in values.items()
                if name in known
            }
        )

    def summary(self, num_devices: int = 1) -> dict[str, Any]:
        """The figures that people read, derived from the counts; a ratio of nothing is None."""
        wall_s = self.wall_ns / NS_PER_S
        tokens_per_s = _ratio(self.num_completion_tokens, wall_s)
        return {
            "num_rows": self.num_rows,
            "num_completions": self.num_completions,
            "num_error_rows": self.num_error_rows,
            "num_completion_tokens": self.num_completion_tokens,
            "wall_s": wall_s,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": None if tokens_per_s is None else tokens_per_s / num_devices,
            "mean_acceptance_length": _ratio(self.num_drafts + self.num_accepted_tokens, self.num_drafts),
            "draft_acceptance_rate": _ratio(self.num_accepted_tokens, self.num_draft_tokens),
            "discard_rate": _ratio(
                self.num_draft_tokens
                - self.num_accepted_tokens
                + self.num_ahead_tokens
                - self.num_ahead_hits
                + self.num_branch_tokens,
                self.num_completion_tokens,
            ),
            "messages_per_round": _ratio(self.num_messages, self.num_rounds),
            "message_bytes_per_round": _ratio(self.num_message_bytes, self.num_rounds),
            "target_message_bytes_per_pass": _ratio(self.num_target_message_bytes, self.num_target_passes),
            "miss_catch_rate": _ratio(sum(self.num_branch_hits_per_rank), self.num_misses),
            "ready_rate": _ratio(self.num_drafts, self.num_row_steps),
            "verification_rate": _ratio(self.num_row_steps, self.num_completion_tokens),
            "target_s": _seconds(self.target_ns),
            "draft_s": _seconds(self.draft_ns),
            "costs": self._costs(),
            "peak_memory_bytes": dataclasses.asdict(self.peak_memory_bytes),
        }

    def _costs(self) -> dict[str, Any]:
        """Time per pass, measured directly and by the regression over completions."""
        t_draft = _ratio(self.draft_ns.draft, self.num_draft_passes) or 0.0
        t_target = _ratio(self.target_ns.verify, self.num_target_passes) or 0.0
        return {
            "measured": self.cost_sums.explained_by(t_draft, t_target),
            "fitted": self.cost_sums.fit(),
        }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _seconds(times: TargetTimes | DraftTimes) -> dict[str, float]:
    return {name: value / NS_PER_S for name, value in dataclasses.asdict(times).items()}


def _add_to(counts: list[int], index: int, amount: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += amount


def _merge(into: Any, other: Any) -> None:
    for item in dataclasses.fields(into):
        mine, theirs = getattr(into, item.name), getattr(other, item.name)
        if isinstance(mine, PeakMemory):
            mine.target, mine.draft = max(mine.target, theirs.target), max(mine.draft, theirs.draft)
        elif isinstance(mine, int):
            setattr(into, item.name, mine + theirs)
        elif isinstance(mine, list):
            for index, amount in enumerate(theirs):
                _add_to(mine, index, amount)
        else:
            _merge(mine, theirs)


def split_proportionally(amount: int, weights: Mapping[Key, int]) -> dict[Key, int]:
    """Split an integer over keys in proportion to positive weights; the parts add up to it exactly."""
    total, before, given = sum(weights.values()), 0, 0
    parts: dict[Key, int] = {}
    for key, weight in weights.items():
        before += weight
        upto = amount * before // total
        parts[key], given = upto - given, upto
    return parts
