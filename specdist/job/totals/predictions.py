"""Predictions of the papers' formulas and of the frozen costs for a run, beside its measurements.

The formulas use the run's acceptance, block lengths and pass times, and assume that every verified token is
accepted independently with the same probability; tokens that a lossy run does not verify are kept. The frozen
costs are applied to the passes that were run. Nothing depends on these figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdist.data.stats.regression import NS_PER_S
from specdist.data.stats.shard import Stats
from specdist.policies.costs import CostModel, Curve
from specdist.policies.formulas import (
    best_length,
    ready_share,
    round_factor,
    tokens_per_call,
)

# The longest fixed length that is considered for the best.
MAX_DRAFT_TOKENS = 40


@dataclass(frozen=True)
class Comparison:
    """One figure, predicted and measured; None where unknown."""

    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.measured is None or not self.predicted else self.measured / self.predicted

    def to_json(self) -> dict[str, float | None]:
        return {"predicted": self.predicted, "measured": self.measured, "ratio": self.ratio}


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions for a run beside its measurements.

    Attributes:
        acceptance: probability that a verified token is accepted; None where none was verified.
        cost_ratio: measured time of a draft step over that of a target pass.
        best_num_draft_tokens: the best fixed length for these two, drafting synchronously.
        theory: figures of the formulas by name; empty where nothing was drafted.
        drift: times of the frozen costs by name; empty without costs.
        target_share_in_curve: share of the target's time in passes of measured sizes. The others, mostly of
            prompts, are larger, and their costs are extrapolated.
    """

    acceptance: float | None
    cost_ratio: float | None
    best_num_draft_tokens: int | None
    theory: Mapping[str, Comparison]
    drift: Mapping[str, Comparison]
    target_share_in_curve: float | None

    def to_json(self) -> dict[str, Any]:
        comparisons = {
            side: {name: figure.to_json() for name, figure in getattr(self, side).items()}
            for side in ("theory", "drift")
        }
        return vars(self) | comparisons


def predictions_of(stats: Stats, costs: CostModel | None) -> Predictions:
    """Predictions beside these statistics; ``costs``: the frozen costs of the run, if any."""
    acceptance = stats.verified_acceptance_rate
    t_draft = _ratio(stats.draft_ns.draft, stats.num_draft_passes)
    t_target = _ratio(stats.target_ns.verify, stats.num_target_passes)
    cost_ratio = t_draft / t_target if t_draft is not None and t_target else None
    best = None
    if acceptance is not None and cost_ratio is not None:
        best = best_length(acceptance, cost_ratio, MAX_DRAFT_TOKENS)
    return Predictions(
        acceptance=acceptance,
        cost_ratio=cost_ratio,
        best_num_draft_tokens=best,
        theory={} if acceptance is None else _theory(stats, acceptance),
        drift={} if costs is None else _drift(stats, costs),
        target_share_in_curve=None if costs is None else _share_in_curve(stats, costs.target),
    )


def _theory(stats: Stats, acceptance: float) -> dict[str, Comparison]:
    num_steps = stats.num_row_steps
    tokens = _expected_tokens(stats, acceptance)
    figures = {
        "tokens_per_row_pass": Comparison(
            _ratio(tokens, num_steps), _ratio(num_steps + stats.num_accepted_tokens, num_steps)
        ),
        "draft_acceptance_rate": Comparison(
            _ratio(tokens - num_steps, stats.num_draft_tokens),
            _ratio(stats.num_accepted_tokens, stats.num_draft_tokens),
        ),
        "verification_rate": Comparison(_ratio(num_steps, tokens), stats.verification_rate),
        "discard_rate": Comparison(_discard_rate(stats, acceptance, tokens), stats.discard_rate),
        "wall_time_factor": _wall_time_factor(stats, tokens),
    }
    if stats.is_asynchronous:
        mean_length = _ratio(stats.num_block_candidates, stats.num_drafts)
        caught = _ratio(sum(stats.num_branch_hits_per_rank), stats.num_misses) or 0.0
        figures["ready_rate"] = Comparison(
            ready_share(acceptance, _num_verified(stats, mean_length or 0.0), caught),
            _ratio(stats.num_drafts, num_steps),
        )
    return figures


def _expected_tokens(stats: Stats, acceptance: float) -> float:
    """Tokens of all target passes, by the lengths of the blocks."""
    drafted = sum(
        count * (length - num_verified + tokens_per_call(acceptance, num_verified))
        for length, count in enumerate(stats.draft_length_histogram)
        for num_verified in [int(_num_verified(stats, length))]
    )
    return drafted + stats.num_row_steps - stats.num_drafts


def _num_verified(stats: Stats, length: float) -> float:
    """How many of a block's candidates the target verifies: in a lossy run the last one alone."""
    return min(length, 1.0) if stats.num_trusted_tokens else length


def _discard_rate(stats: Stats, acceptance: float, tokens: float) -> float | None:
    """Discarded tokens per token of the completions.

    Tokens drafted ahead are all lost if a candidate before them or the first of them is rejected; their mean
    number is then as measured. All branches except the chosen one are lost anyway, and so are passes without
    a token.
    """
    num_discarded = stats.num_draft_tokens - (tokens - stats.num_row_steps)
    num_discarded += stats.num_branch_tokens + stats.num_empty_draft_steps
    num_lost = stats.num_ahead_chains - stats.num_ahead_hits
    if num_lost and stats.num_row_steps:
        lost_length = (stats.num_ahead_tokens - stats.num_ahead_hits) / num_lost
        hits = (stats.num_row_steps - stats.num_drafts) * acceptance + sum(
            count * acceptance ** (_num_verified(stats, length) + 1)
            for length, count in enumerate(stats.draft_length_histogram)
        )
        num_discarded += stats.num_ahead_chains * (1 - hits / stats.num_row_steps) * lost_length
    return _ratio(num_discarded, tokens)


def _wall_time_factor(stats: Stats, tokens: float) -> Comparison:
    """Speed-up over plain decoding with passes as long as this run's (Leviathan et al. 2023, Theorem 3.8);
    plain passes of many sequences would be shorter.

    The measured side is by wall-clock time without prompts, which includes host, messages and waiting.
    """
    verify_ns = stats.target_ns.verify
    wall_ns = stats.wall_ns - stats.target_ns.prefill
    if not stats.num_messages:
        # In one process the target waits for the draft's prompts too.
        wall_ns -= stats.draft_ns.prefill
    drafting = _ratio(stats.draft_ns.draft, verify_ns)
    predicted = _ratio(tokens, stats.num_row_steps)
    measured = _ratio(stats.num_row_steps + stats.num_accepted_tokens, stats.num_row_steps)
    if drafting is None or predicted is None or measured is None or wall_ns <= 0:
        return Comparison(None, None)
    return Comparison(
        round_factor(predicted, drafting, is_asynchronous=stats.is_asynchronous),
        measured * verify_ns / wall_ns,
    )


def _drift(stats: Stats, costs: CostModel) -> dict[str, Comparison]:
    """Predicted and measured seconds of the passes that were run."""
    counts = stats.num_target_passes_per_size
    within = {size: count for size, count in counts.items() if size <= costs.target.sizes[-1]}
    within_ns = sum(stats.target_pass_ns_per_size[size] for size in within)
    target_s, target_ns = _time_s(costs.target, counts), sum(stats.target_pass_ns_per_size.values())
    draft_s = _time_s(costs.draft, stats.num_draft_passes_per_size)
    if stats.is_asynchronous:
        rounds = Comparison(max(target_s, draft_s), (target_ns + stats.target_ns.idle) / NS_PER_S)
    else:
        rounds = Comparison(target_s + draft_s, (target_ns + stats.draft_ns.draft) / NS_PER_S)
    return {
        "target_pass_s": _per_pass(_time_s(costs.target, within), within_ns, sum(within.values())),
        "draft_step_s": _per_pass(draft_s, stats.draft_ns.draft, stats.num_draft_passes),
        "rounds_s": rounds,
    }


def _per_pass(predicted_s: float, measured_ns: int, num_passes: int) -> Comparison:
    return Comparison(_ratio(predicted_s, num_passes), _ratio(measured_ns / NS_PER_S, num_passes))


def _time_s(curve: Curve, counts: Mapping[int, int]) -> float:
    """Seconds of passes, ``counts`` of each size."""
    sizes = np.array(list(counts), float)
    return float(curve(sizes) @ np.array(list(counts.values()), float)) / NS_PER_S


def _share_in_curve(stats: Stats, curve: Curve) -> float | None:
    times = stats.target_pass_ns_per_size
    return _ratio(
        sum(time_ns for size, time_ns in times.items() if size <= curve.sizes[-1]), sum(times.values())
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
