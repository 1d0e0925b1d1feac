"""Statistics of a shard: counts of tokens, and times. Integers only, so that sums are exact and survive JSON.

Names follow vLLM's speculative decoding metrics. Times are nanoseconds; those of each role add up to the wall
time of its rounds. :mod:`specdist.data.stats.schema` describes each count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Any, TypeVar

from specdist.data.stats.regression import NS_PER_S, CostSums
from specdist.utils.json_values import from_fields

Key = TypeVar("Key", bound=Hashable)
SUMMARY_COUNTS = (
    "num_rows", "num_completions", "num_error_rows", "num_cut_completions", "num_out_of_memory",
    "num_completion_tokens",
)  # fmt: skip


@dataclass
class TargetTimes:
    """Nanoseconds of the target's side. ``idle``: waiting for the draft; ``host``: work on the CPU."""

    prefill: int = 0
    verify: int = 0
    transfer: int = 0
    idle: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass
class DraftTimes:
    """Nanoseconds of the draft's side. ``idle``: waiting for the target."""

    prefill: int = 0
    draft: int = 0
    transfer: int = 0
    idle: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass
class PeakMemory:
    """Peak memory of one rank of each role, in bytes; merges as a maximum."""

    target: int = 0
    draft: int = 0


@dataclass
class WorkSpan:
    """Begin and end of the work on a shard, in nanoseconds of Unix time by the replica's clock; both 0 if
    unknown. Merges to the span of both."""

    begin_unix_ns: int = 0
    end_unix_ns: int = 0

    def extend(self, begin_unix_ns: int, end_unix_ns: int) -> None:
        """Include another span; an unknown one changes nothing."""
        if not end_unix_ns:
            return
        self.begin_unix_ns = min(self.begin_unix_ns or begin_unix_ns, begin_unix_ns)
        self.end_unix_ns = max(self.end_unix_ns, end_unix_ns)


@dataclass(frozen=True)
class AheadOutcome:
    """How the tokens that a sequence had drafted ahead, and its branches, met the next token.

    Attributes:
        num_tokens: tokens drafted ahead.
        is_hit: the first of them was the next token; the others are the next candidates.
        num_branches: branches prepared for a miss.
        branch_rank: rank, from 1, of the alternative whose branch became the candidates; 0 if none did.
        num_lost_branch_tokens: tokens of the other branches.
    """

    num_tokens: int
    is_hit: bool
    num_branches: int
    num_lost_branch_tokens: int
    branch_rank: int


@dataclass
class Stats:
    """Statistics of a shard, or the sum of several.

    ``num_drafts`` counts target passes of a sequence with at least one candidate; lists are indexed by draft
    position, or by length. Discarded = drafted - accepted. In a lossy run ``num_trusted_tokens`` of the
    accepted tokens were committed without the target's verification. ``num_head_tokens`` counts
    estimates of a trained head, ``num_forced_draft_tokens`` tokens that a constraint forces: drafted without
    a pass.

    With draft-ahead, ``num_ahead_chains`` counts the rounds in which a sequence had tokens drafted ahead of
    its candidates; ``num_ahead_verified`` those whose candidates were all accepted; ``num_ahead_hits`` those
    whose first token ahead was the next token. ``num_ahead_tokens`` counts that token, or at a miss all
    tokens ahead. A miss is a next token that dropped drafted tokens; ``num_branch_hits_per_rank`` counts
    misses with a prepared branch, by the rank of its first token; ``num_branch_tokens`` the tokens of unused
    branches.

    ``num_starts`` counts replicas whose first token belongs to the shard, ``first_token_ns`` the time from
    the beginning of their processes until then, and ``num_weight_bytes`` what all their ranks read of weight
    files.

    ``num_out_of_memory`` rounds ran out of memory and were repeated with a smaller batch. Messages are sent
    between the target's rank 0 and the draft, target messages between the target's ranks.

    Passes and their times are also counted by size, in tokens including those of prompts. A draft step has a
    token per sequence, and those that its cache lacks.

    The regressions explain the time of drafting and verifying, without prompts, by the number of passes: an
    observation of ``cost_sums`` is a completion, from its first round to its last, and one of
    ``shard_cost_sums`` a shard. ``work_span`` is from a shard's first request to its last completion,
    including restarts.
    """

    num_rows: int = 0
    num_completions: int = 0
    num_error_rows: int = 0
    num_cut_completions: int = 0
    num_prompt_tokens: int = 0
    num_shared_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_target_passes: int = 0
    num_draft_passes: int = 0
    num_target_passes_per_size: dict[int, int] = field(default_factory=dict)
    target_pass_ns_per_size: dict[int, int] = field(default_factory=dict)
    num_draft_passes_per_size: dict[int, int] = field(default_factory=dict)
    num_draft_row_steps: int = 0
    num_empty_draft_steps: int = 0
    num_row_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_trusted_tokens: int = 0
    num_head_tokens: int = 0
    num_forced_draft_tokens: int = 0
    num_preemptions: int = 0
    num_out_of_memory: int = 0
    num_starts: int = 0
    first_token_ns: int = 0
    num_weight_bytes: int = 0
    num_rounds: int = 0
    num_messages: int = 0
    num_message_bytes: int = 0
    num_state_bytes: int = 0
    num_target_messages: int = 0
    num_target_message_bytes: int = 0
    num_ahead_chains: int = 0
    num_ahead_verified: int = 0
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
    shard_cost_sums: CostSums = field(default_factory=CostSums)
    peak_memory_bytes: PeakMemory = field(default_factory=PeakMemory)
    work_span: WorkSpan = field(default_factory=WorkSpan)

    def observe_ahead(self, outcome: AheadOutcome, *, is_reached: bool, is_miss: bool) -> None:
        """Count what became known with a next token; tokens that become candidates are counted as such later.

        ``is_reached``: all candidates were accepted, so the first token ahead was verified. ``is_miss``: the
        next token dropped drafted tokens.
        """
        self.num_misses += is_miss
        self.num_branches += outcome.num_branches
        self.num_branch_tokens += outcome.num_lost_branch_tokens
        if outcome.branch_rank:
            _add_to(self.num_branch_hits_per_rank, outcome.branch_rank - 1, 1)
        if outcome.num_tokens == 0:
            return
        self.num_ahead_chains += 1
        self.num_ahead_verified += is_reached
        self.num_ahead_hits += outcome.is_hit
        self.num_ahead_tokens += 1 if outcome.is_hit else outcome.num_tokens

    def observe_block(self, *, num_drafted: int, num_accepted: int, num_trusted: int = 0) -> None:
        """Count one sequence's block of a target pass; ``num_trusted`` of the accepted tokens were not
        verified."""
        self.num_row_steps += 1
        if num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_trusted_tokens += num_trusted
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        _add_to(self.draft_length_histogram, num_drafted, 1)
        _add_to(self.accepted_length_histogram, num_accepted, 1)
        for position in range(num_accepted):
            _add_to(self.num_accepted_tokens_per_pos, position, 1)

    def observe_target_pass(self, *, num_tokens: int, time_ns: int = 0) -> None:
        """Count a target pass; ``time_ns``: the part of its time that is known already."""
        self.num_target_passes += 1
        _count(self.num_target_passes_per_size, num_tokens, 1)
        self.add_pass_time(num_tokens=num_tokens, time_ns=time_ns)

    def add_pass_time(self, *, num_tokens: int, time_ns: int) -> None:
        """Add time to a pass that was counted before: a device's times are known later."""
        _count(self.target_pass_ns_per_size, num_tokens, time_ns)

    def observe_draft_passes(self, sizes: Iterable[int]) -> None:
        """Count draft steps of so many tokens each."""
        for num_tokens in sizes:
            self.num_draft_passes += 1
            _count(self.num_draft_passes_per_size, num_tokens, 1)

    def close_shard(self) -> None:
        """Count the complete shard as an observation of the regression over shards."""
        self.shard_cost_sums = CostSums()
        self.shard_cost_sums.observe(
            time_ns=self.target_ns.verify + self.draft_ns.draft,
            num_draft_passes=self.num_draft_passes,
            num_target_passes=self.num_target_passes,
        )

    @property
    def verified_acceptance_rate(self) -> float | None:
        """Share of accepted tokens among the verified ones: candidates up to the first rejected one, and
        first tokens ahead. (``draft_acceptance_rate`` also counts the candidates after a rejected one.)"""
        num_accepted = self.num_accepted_tokens - self.num_trusted_tokens + self.num_ahead_hits
        return _ratio(num_accepted, num_accepted + self.num_misses)

    @property
    def num_discarded(self) -> int:
        """Discarded draft tokens, candidates or not, and draft passes of a sequence without a token.

        Of a run in turns, without preemption and repeated rounds, N_draft + N_target = N + N_discarded
        (SpecDec++, Lemma 3.1). N_draft is ``num_draft_row_steps`` and the forced tokens. N_target is
        ``num_row_steps``, and one for each completion: the pass over its prompt gives its first token. N is
        ``num_completion_tokens``, and one for each completion that ends with a draft token: its last pass
        gives one more, which is dropped.
        """
        return (
            self.num_draft_tokens
            - self.num_accepted_tokens
            + self.num_ahead_tokens
            - self.num_ahead_hits
            + self.num_branch_tokens
            + self.num_empty_draft_steps
        )

    @property
    def discard_rate(self) -> float | None:
        """Discarded draft tokens and empty draft passes per token of the completions (SpecDec++)."""
        return _ratio(self.num_discarded, self.num_completion_tokens)

    @property
    def verification_rate(self) -> float | None:
        """Target passes of a sequence per token of its completion (SpecDec++)."""
        return _ratio(self.num_row_steps, self.num_completion_tokens)

    @property
    def num_block_candidates(self) -> int:
        """Candidates in target passes; those dropped before a pass are drafted, but do not count here."""
        return sum(length * count for length, count in enumerate(self.draft_length_histogram))

    @property
    def works_ahead(self) -> bool:
        """The draft worked while the target did."""
        return self.num_ahead_chains > 0

    def add(self, other: Stats) -> None:
        """Merge another shard's into this one."""
        _merge(self, other)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Stats:
        """Unknown names are ignored. Raises ValueError for values of the wrong type."""
        known = {item.name for item in dataclasses.fields(Stats)}
        return from_fields(Stats, {name: value for name, value in values.items() if name in known})

    def summary(self, num_devices: float = 1) -> dict[str, Any]:
        """Figures for people, derived from the counts; a ratio with denominator 0 is None."""
        wall_s = self.wall_ns / NS_PER_S
        tokens_per_s = _ratio(self.num_completion_tokens, wall_s)
        return {
            **{name: getattr(self, name) for name in SUMMARY_COUNTS},
            "wall_s": wall_s,
            "tokens_per_s": tokens_per_s,
            "time_to_first_token_s": _ratio(self.first_token_ns / NS_PER_S, self.num_starts),
            "tokens_per_s_per_device": None if tokens_per_s is None else tokens_per_s / num_devices,
            "mean_acceptance_length": _ratio(self.num_drafts + self.num_accepted_tokens, self.num_drafts),
            "draft_acceptance_rate": _ratio(self.num_accepted_tokens, self.num_draft_tokens),
            "num_trusted_tokens": self.num_trusted_tokens,
            "discard_rate": self.discard_rate,
            "messages_per_round": _ratio(self.num_messages, self.num_rounds),
            "message_bytes_per_round": _ratio(self.num_message_bytes, self.num_rounds),
            "state_bytes_per_round": _ratio(self.num_state_bytes, self.num_rounds),
            "target_message_bytes_per_pass": _ratio(self.num_target_message_bytes, self.num_target_passes),
            "miss_catch_rate": _ratio(sum(self.num_branch_hits_per_rank), self.num_misses),
            "ready_rate": _ratio(self.num_drafts, self.num_row_steps),
            "verification_rate": self.verification_rate,
            "target_s": _seconds(self.target_ns),
            "draft_s": _seconds(self.draft_ns),
            "costs": self.costs(),
            "peak_memory_bytes": dataclasses.asdict(self.peak_memory_bytes),
        }

    def costs(self) -> dict[str, Any]:
        """Time per pass, measured directly and by regression, over completions and over shards."""
        t_draft = _ratio(self.draft_ns.draft, self.num_draft_passes) or 0.0
        t_target = _ratio(self.target_ns.verify, self.num_target_passes) or 0.0
        return {
            "measured": self.cost_sums.explained_by(t_draft, t_target),
            "fitted": self.cost_sums.fit(),
            "fitted_over_shards": self.shard_cost_sums.fit(),
        }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _seconds(times: TargetTimes | DraftTimes) -> dict[str, float]:
    return {name: value / NS_PER_S for name, value in dataclasses.asdict(times).items()}


def _add_to(counts: list[int], index: int, amount: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += amount


def _count(counts: dict[int, int], key: int, amount: int) -> None:
    counts[key] = counts.get(key, 0) + amount


def _merge(into: Any, other: Any) -> None:
    for name in into.__dataclass_fields__:
        mine, theirs = getattr(into, name), getattr(other, name)
        if isinstance(mine, int):
            setattr(into, name, mine + theirs)
        elif isinstance(mine, list):
            mine.extend([0] * (len(theirs) - len(mine)))
            mine[: len(theirs)] = map(add, mine, theirs)
        elif isinstance(mine, dict):
            mine |= {key: mine.get(key, 0) + amount for key, amount in theirs.items()}
        elif isinstance(mine, PeakMemory):
            mine.target, mine.draft = max(mine.target, theirs.target), max(mine.draft, theirs.draft)
        elif isinstance(mine, WorkSpan):
            mine.extend(theirs.begin_unix_ns, theirs.end_unix_ns)
        else:
            _merge(mine, theirs)


def split_proportionally(amount: int, weights: Mapping[Key, int]) -> dict[Key, int]:
    """Split an integer over keys in proportion to positive weights; the parts add up to it."""
    total, before, given = sum(weights.values()), 0, 0
    parts: dict[Key, int] = {}
    for key, weight in weights.items():
        before += weight
        upto = amount * before // total
        parts[key], given = upto - given, upto
    return parts
