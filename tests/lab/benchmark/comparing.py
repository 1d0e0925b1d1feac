"""What is compared besides: groups of rows, ways of running the draft, and first lengths of policies."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from specdist.data.stats.shard import NS_PER_S, Stats
from specdist.lab.benchmark.methods import Generated
from specdist.lab.benchmark.run import Timed, compare
from specdist.policies.formulas import ready_share
from specdist.sampling.distributions import SamplingSettings
from tests.lab.benchmark.config import COLOCATED, SEPARATE
from tests.lab.benchmark.lineup import PlacedSpecdist
from tests.lab.benchmark.results import (
    ComparedMethod,
    GroupResult,
    OverlapResult,
    PolicyResult,
    SpreadResult,
)
from tests.lab.draft_rank import RankOrder

Groups = Mapping[str, Sequence[Timed]]


def compare_groups(groups: Groups, settings: SamplingSettings) -> list[ComparedMethod]:
    """One result for each method.

    Args:
        groups: the methods in the same order on the rows of every group.
    """
    wholes = [joined(parts) for parts in zip(*groups.values(), strict=True)]
    by_group = {name: compare(items, settings) for name, items in groups.items()}
    alone = {item.method.batch_size: item for item in wholes if item.is_target_only}
    synchronous = {_policy_key(item): item for item in wholes if _placement(item) == SEPARATE}
    results = []
    for index, (item, plain) in enumerate(zip(wholes, compare(wholes, settings), strict=True)):
        base = alone.get(item.method.batch_size)
        rate, base_rate = _decoding_tokens_per_s(item), base and _decoding_tokens_per_s(base)
        parts = {name: found[index] for name, found in by_group.items()} if len(groups) > 1 else {}
        results.append(
            ComparedMethod(
                **vars(plain),
                decoding_ratio_to_target_only=rate and base_rate and rate / base_rate,
                overlap=_overlap(item, synchronous.get(_policy_key(item))),
                policy=_policy(item),
                groups=[
                    GroupResult(
                        name=name,
                        num_rows=len(groups[name][index].rows),
                        seconds=part.seconds,
                        num_tokens=part.num_tokens,
                        tokens_per_s=part.tokens_per_s,
                        ratio_to_target_only=part.ratio_to_target_only,
                    )
                    for name, part in parts.items()
                ],
            )
        )
    return results


def joined(parts: Sequence[Timed]) -> Timed:
    """One method on several groups of rows together, repeat by repeat."""
    rows = list(itertools.chain.from_iterable(part.rows for part in parts))
    whole = Timed(
        parts[0].method, rows, [sum(each) for each in zip(*(part.seconds for part in parts), strict=True)]
    )
    for repeat in zip(*(part.generated for part in parts), strict=True):
        total = Stats()
        for part in repeat:
            total.add(part.stats or Stats())
        completions = [completion for part in repeat for completion in part.completions]
        has_stats = all(part.stats is not None for part in repeat)
        whole.generated.append(Generated(completions, total if has_stats else None))
    return whole


def compare_lengths(results: Sequence[ComparedMethod]) -> list[SpreadResult]:
    """How much each policy depends on its first length, by batch size and placement."""
    ratios: dict[tuple[int, str], dict[str, dict[int, float]]] = {}
    for result in results:
        policy, ratio = result.policy, result.ratio_to_target_only
        if policy is not None and policy.first_length is not None and ratio is not None:
            found = ratios.setdefault((result.batch_size, policy.placement), {})
            found.setdefault(policy.family, {})[policy.first_length] = ratio
    return [
        spread
        for (batch_size, placement), found in ratios.items()
        for spread in spreads_of(found, placement=placement, batch_size=batch_size)
    ]


def spreads_of(
    ratios: Mapping[str, Mapping[int, float]], *, placement: str, batch_size: int
) -> list[SpreadResult]:
    """Spreads of all policies with several first lengths, over the lengths that all of these have.

    Args:
        ratios: by family and first length.
    """
    several = {family: found for family, found in ratios.items() if len(found) > 1}
    lengths = sorted(set.intersection(*map(set, several.values()))) if several else []
    if len(lengths) < 2:
        return []
    values = {family: [found[length] for length in lengths] for family, found in several.items()}
    fixed = statistics.mean(values["fixed"]) if "fixed" in values else None
    return [
        SpreadResult(
            family=family,
            placement=placement,
            batch_size=batch_size,
            first_lengths=lengths,
            ratios=found,
            mean=statistics.mean(found),
            deviation=statistics.pstdev(found),
            range=max(found) - min(found),
            mean_to_fixed=fixed and statistics.mean(found) / fixed,
            deviation_to_fixed=fixed and statistics.pstdev(found) / fixed,
        )
        for family, found in values.items()
    ]


def overlap_of(stats: Stats, order: RankOrder, ratio_to_separate: float | None) -> OverlapResult:
    """Read it from a run's statistics."""
    acceptance = stats.verified_acceptance_rate
    caught = _share(sum(stats.num_branch_hits_per_rank), stats.num_misses)
    predicted = None
    if order.ahead.num_ahead and acceptance is not None:
        predicted = ready_share(acceptance, order.ahead.num_ahead - 1, caught or 0.0)
    return OverlapResult(
        ratio_to_separate=ratio_to_separate,
        num_branches=order.ahead.num_branches,
        tokens_per_row_pass=_share(stats.num_completion_tokens, stats.num_row_steps),
        acceptance=acceptance,
        ready_share=_share(stats.num_drafts, stats.num_row_steps),
        predicted_ready_share=predicted,
        num_hits_per_rank=stats.num_branch_hits_per_rank,
        miss_catch_rate=caught,
        target_idle_share=_share(stats.target_ns.idle, stats.target_ns.total),
        draft_idle_share=_share(stats.draft_ns.idle, stats.draft_ns.total),
    )


def _placement(item: Timed) -> str | None:
    return item.method.placement if isinstance(item.method, PlacedSpecdist) else None


def _policy_key(item: Timed) -> tuple[int, str]:
    """Batch size and policy, which methods share that differ in the placement alone."""
    order = item.method.order
    return item.method.batch_size, "" if order is None else order.choice.label


def _overlap(item: Timed, synchronous: Timed | None) -> OverlapResult | None:
    """For specdist with a draft, where the draft was run on a rank of its own too."""
    stats = item.generated[-1].stats
    if synchronous is None or stats is None or not isinstance(item.method, PlacedSpecdist):
        return None
    return overlap_of(stats, item.method.order, item.over(synchronous))


def _policy(item: Timed) -> PolicyResult | None:
    if not isinstance(item.method, PlacedSpecdist):
        return None
    order = item.method.order
    return PolicyResult(
        family=order.choice.family,
        first_length=order.choice.first_length,
        placement=item.method.placement,
        num_branches=order.ahead.num_branches,
    )


def _decoding_tokens_per_s(item: Timed) -> float | None:
    """Without the prompts' passes; of two ranks, without those of the target. None for other engines.

    With small models prompts take much of a run, and no draft makes them shorter.
    """
    rates = []
    for seconds, generated in zip(item.seconds, item.generated, strict=True):
        if (stats := generated.stats) is None:
            return None
        prompts_ns = stats.target_ns.prefill
        if _placement(item) in (None, COLOCATED):
            prompts_ns += stats.draft_ns.prefill
        rates.append(generated.num_tokens / (seconds - prompts_ns / NS_PER_S))
    return statistics.median(rates)


def _share(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
