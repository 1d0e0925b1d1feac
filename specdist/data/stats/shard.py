"""Statistics of a shard: counts of tokens, and times. Integers only, so that sums are exact and survive JSON.

Names follow vLLM's speculative decoding metrics. Times are nanoseconds; those of each role add up to the wall
time of its rounds. A count is declared once, with its meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from specdist.data.stats.fields import DraftTimes, PeakMemory, TargetTimes, WorkSpan, add_to, stat
from specdist.data.stats.regression import NS_PER_S, CostSums
from specdist.utils.json_values import from_fields

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class AheadOutcome:
    """How the tokens that a sequence had drafted ahead, and its branches, met the next token.

    Attributes:
        num_tokens: tokens drafted ahead.
        is_hit: the first of them was the next token; the others are the next candidates.
        num_branches: branches prepared for a miss.
        is_caught: a branch became the candidates.
        num_lost_branch_tokens: tokens of the other branches.
    """

    num_tokens: int
    is_hit: bool
    num_branches: int
    num_lost_branch_tokens: int
    is_caught: bool


@dataclass
class Stats:
    """Statistics of a shard, or the sum of several. Each field says what it counts.

    Lists are indexed by draft position, or by length. A miss is a next token that dropped drafted tokens. A
    draft step has a token per sequence, and those that its cache lacks. The regression explains the time of
    drafting and verifying, without prompts, by the number of passes.
    """

    num_rows: int = stat("input rows")
    num_completions: int = stat("completions, without those that have an error")
    num_error_rows: int = stat("input rows with an error")
    num_cut_completions: int = stat("completions that were cut by a length limit (`finish_reason` `length`)")
    num_looping_completions: int = stat("completions that ended in a loop (`finish_reason` `repetition`)")
    num_prompt_tokens: int = stat("tokens of the prompts, once per completion")
    num_shared_prompt_tokens: int = stat("of these, those that were in the cache already, from another row")
    num_completion_tokens: int = stat("tokens of the completions")
    num_attempts: int = stat("attempts at completions that a function judges (`--rollout`)")
    num_rejected_tokens: int = stat("tokens of attempts that it rejected, no part of completions")
    num_rollout_calls: int = stat("calls of the function")
    rollout_ns: int = stat("nanoseconds of these calls, beside the rounds")
    num_target_passes: int = stat("forward passes of the target")
    num_draft_passes: int = stat("forward passes of the draft")
    num_draft_row_steps: int = stat("draft passes, counted per sequence and branch")
    num_empty_draft_steps: int = stat("of these, those that drafted no token")
    num_row_steps: int = stat("target passes that determined a next token, counted per sequence")
    num_drafts: int = stat("of these, those that verified at least one draft token of the sequence")
    num_draft_tokens: int = stat("draft tokens proposed to the target")
    num_accepted_tokens: int = stat("of these, the accepted ones")
    num_trusted_tokens: int = stat("of these, those that a lossy run committed unverified")
    num_forced_draft_tokens: int = stat("draft tokens that a row's constraint forces: drafted without a pass")
    num_preemptions: int = stat("times that a sequence gave back its cache pages, to be computed again later")
    num_starts: int = stat("replicas whose first token belongs to the shard")
    first_token_ns: int = stat("nanoseconds from the start of these replicas' processes to that token")
    num_rounds: int = stat("rounds (draft, verify, commit)")
    costs_revision: int = stat(
        "which of the manifest's costs the shard was begun with: corrections before; merges as a maximum",
        merge=max,
    )
    num_ahead_chains: int = stat(
        "chains of tokens drafted ahead (`--overlap asynchronous`), one per row and round"
    )
    num_ahead_verified: int = stat("of these, those whose candidates were all accepted")
    num_ahead_hits: int = stat("of these, those whose first token was the next token of the target")
    num_ahead_tokens: int = stat("tokens ahead that became no candidates: a hit's first, all of a lost chain")
    num_misses: int = stat("next tokens that invalidated what was drafted after them")
    num_branches: int = stat("branches prepared for misses")
    num_branch_tokens: int = stat("tokens of the branches that were not used")
    num_branch_hits: int = stat("misses that a branch caught")
    num_accepted_tokens_per_pos: list[int] = stat("accepted tokens by their position in the block", list)
    draft_length_histogram: list[int] = stat("blocks by number of draft tokens", list)
    accepted_length_histogram: list[int] = stat("blocks by number of accepted tokens", list)
    wall_ns: int = stat("nanoseconds of the rounds, split by rows where two shards share a round")
    target_ns: TargetTimes = stat("", TargetTimes)
    draft_ns: DraftTimes = stat("", DraftTimes)
    cost_sums: CostSums = stat("", CostSums)
    peak_memory_bytes: PeakMemory = stat("", PeakMemory)
    work_span: WorkSpan = stat("", WorkSpan)

    def observe_ahead(self, outcome: AheadOutcome, *, is_reached: bool, is_miss: bool) -> None:
        """Count what became known with a next token; tokens that become candidates are counted as such later.

        ``is_reached``: all candidates were accepted, so the first token ahead was verified. ``is_miss``: the
        next token dropped drafted tokens.
        """
        self.num_misses += is_miss
        self.num_branches += outcome.num_branches
        self.num_branch_tokens += outcome.num_lost_branch_tokens
        self.num_branch_hits += outcome.is_caught
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

    @property
    def num_discarded(self) -> int:
        """Discarded draft tokens, candidates or not, and draft passes of a sequence without a token.

        Of a synchronous run, without preemption and repeated rounds, N_draft + N_target = N + N_discarded
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

    def add(self, other: Any) -> None:
        """Merge another shard's into this one, or what a round has counted under the same names."""
        add_to(self, other)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Stats:
        """Unknown names are ignored. Raises ValueError for values of the wrong type."""
        known = {item.name for item in dataclasses.fields(Stats)}
        return from_fields(Stats, {name: value for name, value in values.items() if name in known})

    def summary(self, num_devices: float = 1) -> dict[str, Any]:
        """Figures for people, derived from the counts; a ratio with denominator 0 is None."""
        return {name: figure(self, num_devices) for name, (_, figure) in FIGURES.items()}

    def costs(self) -> dict[str, Any]:
        """Time per pass, measured directly and by regression over completions."""
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


def split_proportionally(amount: int, weights: Mapping[Key, int]) -> dict[Key, int]:
    """Split an integer over keys in proportion to positive weights; the parts add up to it."""
    total, before, given = sum(weights.values()), 0, 0
    parts: dict[Key, int] = {}
    for key, weight in weights.items():
        before += weight
        upto = amount * before // total
        parts[key], given = upto - given, upto
    return parts


Figure = Callable[[Stats, float], Any]


def _counted(name: str) -> tuple[str, Figure]:
    """A statistic that is a figure itself."""
    return Stats.__dataclass_fields__[name].metadata["meaning"], lambda stats, _: getattr(stats, name)


# Figures by name: what each says, and how it follows from the statistics and the number of devices.
FIGURES: dict[str, tuple[str, Figure]] = {
    "num_rows": _counted("num_rows"),
    "num_completions": _counted("num_completions"),
    "num_error_rows": _counted("num_error_rows"),
    "num_cut_completions": _counted("num_cut_completions"),
    "num_looping_completions": _counted("num_looping_completions"),
    "num_completion_tokens": _counted("num_completion_tokens"),
    "num_attempts": _counted("num_attempts"),
    "num_rejected_tokens": _counted("num_rejected_tokens"),
    "rollout_call_s": (
        "seconds that a call of the rollout function took, on average",
        lambda stats, _: _ratio(stats.rollout_ns / NS_PER_S, stats.num_rollout_calls),
    ),
    "wall_s": ("seconds of work, summed over replicas", lambda stats, _: stats.wall_ns / NS_PER_S),
    "tokens_per_s": (
        "completion tokens per second of one replica's work",
        lambda stats, _: _ratio(stats.num_completion_tokens, stats.wall_ns / NS_PER_S),
    ),
    "time_to_first_token_s": (
        "seconds from the start of a replica's process to its first token, on average",
        lambda stats, _: _ratio(stats.first_token_ns / NS_PER_S, stats.num_starts),
    ),
    "tokens_per_s_per_device": (
        "the same, divided by the number of ranks of a replica",
        lambda stats, devices: _ratio(stats.num_completion_tokens, stats.wall_ns / NS_PER_S * devices),
    ),
    "mean_acceptance_length": (
        "tokens per speculative step, 1 + accepted / steps",
        lambda stats, _: _ratio(stats.num_drafts + stats.num_accepted_tokens, stats.num_drafts),
    ),
    "draft_acceptance_rate": (
        "share of the proposed draft tokens that were accepted",
        lambda stats, _: _ratio(stats.num_accepted_tokens, stats.num_draft_tokens),
    ),
    "num_trusted_tokens": (
        "accepted tokens that a lossy run committed unverified",
        lambda stats, _: stats.num_trusted_tokens,
    ),
    "discard_rate": (
        "discarded draft tokens, and draft passes of a sequence without a token, per completion token "
        "(SpecDec++)",
        lambda stats, _: _ratio(stats.num_discarded, stats.num_completion_tokens),
    ),
    "miss_catch_rate": (
        "share of the misses that were caught by a branch",
        lambda stats, _: _ratio(stats.num_branch_hits, stats.num_misses),
    ),
    "ready_rate": (
        "share of a sequence's target passes that had draft tokens",
        lambda stats, _: _ratio(stats.num_drafts, stats.num_row_steps),
    ),
    "verification_rate": (
        "target passes of a sequence per completion token (SpecDec++)",
        lambda stats, _: _ratio(stats.num_row_steps, stats.num_completion_tokens),
    ),
    "target_s": (
        "seconds of the target side: prefill, verify, transfer, idle, host",
        lambda stats, _: _seconds(stats.target_ns),
    ),
    "draft_s": (
        "seconds of the draft side: prefill, draft, transfer, idle",
        lambda stats, _: _seconds(stats.draft_ns),
    ),
    "costs": (
        "seconds per pass, `measured`, and `fitted` to completions, with R²",
        lambda stats, _: stats.costs(),
    ),
    "peak_memory_bytes": (
        "peak bytes on one rank, by role",
        lambda stats, _: dataclasses.asdict(stats.peak_memory_bytes),
    ),
}
