"""How measured methods compare: medians, ratios, and whether they gave the same tokens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from specdist.data.stats.shard import NS_PER_S, Stats
from specdist.lab.benchmark.config import COLOCATED, SEPARATE
from specdist.lab.benchmark.measuring import Measured, Timed
from specdist.lab.benchmark.methods import Method, Specdist, TransformersAssisted, TransformersGenerate
from specdist.lab.benchmark.results import (
    GroupResult,
    MethodResult,
    OverlapResult,
    PolicyResult,
    SpreadResult,
)
from specdist.lab.benchmark.sides.drafts import DraftOrder
from specdist.policies.formulas import ready_share
from specdist.policies.registry import TARGET_ONLY
from specdist.sampling.distributions import SamplingSettings


def compare(measured: Sequence[Measured], settings: SamplingSettings) -> list[MethodResult]:
    """Medians and ratios; and how many rows differ from those of the first ``generate``, or of the target
    alone where transformers was not measured."""
    wholes = [(item.method, item.whole) for item in measured]
    by_name = {(method.name, method.batch_size): whole for method, whole in wholes}
    assisted = by_name.get((TransformersAssisted.name, 1))
    alone = {item.method.batch_size: item for item in measured if _is_target_only(item.method)}
    in_turns = {_policy_key(method): whole for method, whole in wholes if method.placement == SEPARATE}
    peers: dict[int, Timed] = {}
    for method, whole in wholes:
        best = peers.get(method.batch_size)
        if is_peer(method) and (best is None or whole.tokens_per_s > best.tokens_per_s):
            peers[method.batch_size] = whole
    reference = _reference(wholes, settings)
    results = []
    for item, (method, whole) in zip(measured, wholes, strict=True):
        stats, base = whole.generated[-1].stats, alone.get(method.batch_size)
        rate = _decoding_tokens_per_s(item)
        base_rate = None if base is None else _decoding_tokens_per_s(base)
        results.append(
            MethodResult(
                name=method.name,
                batch_size=method.batch_size,
                **_timing(whole, None if base is None else base.whole),
                ratio_to_assisted=_ratio_to(assisted, whole),
                ratio_to_generate=_ratio_to(
                    by_name.get((TransformersGenerate.name, method.batch_size)), whole
                ),
                decoding_ratio_to_target_only=rate and base_rate and rate / base_rate,
                num_rows_differing=None if reference is None else _num_differing(whole, reference),
                statistics=None if stats is None else stats.summary(),
                overlap=_overlap(method, whole, in_turns.get(_policy_key(method))),
                policy=_policy(method),
                ratio_to_peer=_ratio_to(peers.get(method.batch_size), whole),
                groups=_groups(item, base),
            )
        )
    return results


def compare_lengths(results: Sequence[MethodResult]) -> list[SpreadResult]:
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


def overlap_of(stats: Stats, order: DraftOrder, ratio_to_separate: float | None) -> OverlapResult:
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


def is_peer(method: Method) -> bool:
    """Whether it is of another engine than specdist and transformers."""
    return not isinstance(method, Specdist | TransformersGenerate)


def _is_target_only(method: Method) -> bool:
    return method.order is not None and method.order.choice.policy == TARGET_ONLY


def _policy_key(method: Method) -> tuple[int, str]:
    """Batch size and policy, which methods share that differ in the placement alone."""
    return method.batch_size, "" if method.order is None else method.order.choice.label


def _reference(wholes: Sequence[tuple[Method, Timed]], settings: SamplingSettings) -> list[list[int]] | None:
    """The completions that all others should equal; None where they may differ."""
    plain = [pair for pair in wholes if pair[0].name == TransformersGenerate.name]
    alone = [pair for pair in wholes if _is_target_only(pair[0])]
    # With Gumbel noise the tokens are those of the target alone for the seed, but not in transformers.
    is_comparable = settings.is_greedy if plain else not settings.is_random
    if not is_comparable:
        return None
    _, whole = min(plain or alone, key=lambda pair: pair[0].batch_size)
    return whole.generated[0].completions


def _overlap(method: Method, whole: Timed, in_turns: Timed | None) -> OverlapResult | None:
    """For specdist with a draft, where the draft was run on a rank of its own too."""
    order, stats = method.order, whole.generated[-1].stats
    if in_turns is None or order is None or stats is None or not order.choice.max_draft_tokens:
        return None
    return overlap_of(stats, order, _ratio_to(in_turns, whole))


def _policy(method: Method) -> PolicyResult | None:
    order, placement = method.order, method.placement
    if order is None or placement is None or _is_target_only(method):
        return None
    return PolicyResult(
        family=order.choice.family,
        first_length=order.choice.first_length,
        placement=placement,
        num_branches=order.ahead.num_branches,
    )


def _groups(item: Measured, alone: Measured | None) -> list[GroupResult]:
    """One result per group, where there is more than one."""
    return [
        GroupResult(
            name=name,
            num_rows=group.num_rows,
            **_timing(group, None if alone is None else alone.groups[name]),
        )
        for name, group in item.groups.items()
        if len(item.groups) > 1
    ]


def _timing(item: Timed, alone: Timed | None) -> dict[str, Any]:
    """The fields of a :class:`Timing`."""
    return {
        "seconds": item.seconds,
        "num_tokens": item.num_tokens,
        "tokens_per_s": item.tokens_per_s,
        "ratio_to_target_only": _ratio_to(alone, item),
    }


def _ratio_to(base: Timed | None, item: Timed) -> float | None:
    return None if base is None else item.tokens_per_s / base.tokens_per_s


def _decoding_tokens_per_s(item: Measured) -> float | None:
    """Without the prompts' passes; of two ranks, without those of the target. None for transformers.

    With small models prompts take much of a run, and no draft makes them shorter.
    """
    rates, whole = [], item.whole
    for seconds, generated in zip(whole.seconds, whole.generated, strict=True):
        if (stats := generated.stats) is None:
            return None
        prompts_ns = stats.target_ns.prefill
        if item.method.placement == COLOCATED:
            prompts_ns += stats.draft_ns.prefill
        rates.append(generated.num_tokens / (seconds - prompts_ns / NS_PER_S))
    return statistics.median(rates)


def _num_differing(item: Timed, reference: list[list[int]]) -> int:
    """Rows that differ in any repeat."""
    return sum(
        any(generated.completions[row] != completion for generated in item.generated)
        for row, completion in enumerate(reference)
    )


def _share(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
