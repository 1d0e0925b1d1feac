"""How measured methods compare: medians, ratios, and whether they gave the same tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from specdist.benchmark.config import SEPARATE
from specdist.benchmark.measuring import Measured, Timed
from specdist.benchmark.methods import TransformersAssisted, TransformersGenerate
from specdist.benchmark.overlap import OverlapResult, overlap_of
from specdist.benchmark.results import GroupResult, MethodResult, PolicyResult
from specdist.benchmark.spread import SpreadResult, spreads_of
from specdist.policy_options import TARGET_ONLY
from specdist.sampling.distributions import SamplingSettings


def compare(measured: Sequence[Measured], settings: SamplingSettings) -> list[MethodResult]:
    """Medians and ratios; and how many rows differ from those of the first ``generate``, or where
    transformers was not measured from those of the target alone."""
    plain = {
        item.method.batch_size: item for item in measured if item.method.name == TransformersGenerate.name
    }
    alone = {item.method.batch_size: item for item in measured if _is_target_only(item)}
    assisted = next((item for item in measured if item.method.name == TransformersAssisted.name), None)
    in_turns = {_key(item): item for item in measured if item.method.placement == SEPARATE}
    # With gumbel noise tokens are the target's own for the seed, of which transformers knows nothing.
    is_comparable = settings.is_greedy if plain else not settings.is_random
    reference = _reference(plain or alone) if is_comparable else None
    return [
        MethodResult(
            name=item.method.name,
            batch_size=item.method.batch_size,
            seconds=item.seconds,
            num_tokens=item.num_tokens,
            median_s=statistics.median(item.seconds),
            tokens_per_s=item.tokens_per_s,
            ratio_to_assisted=_ratio_to(assisted, item),
            ratio_to_generate=_ratio_to(plain.get(item.method.batch_size), item),
            ratio_to_target_only=_ratio_to(alone.get(item.method.batch_size), item),
            decoding_ratio_to_target_only=_decoding_ratio_to(alone.get(item.method.batch_size), item),
            num_rows_differing=None if reference is None else _num_differing(item, reference),
            statistics=None if (stats := item.stats) is None else stats.summary(),
            overlap=_overlap(item, in_turns.get(_key(item))),
            policy=_policy(item),
            groups=_groups(item, alone.get(item.method.batch_size)),
        )
        for item in measured
    ]


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


def _is_target_only(item: Measured) -> bool:
    return item.method.order is not None and item.method.order.choice.policy == TARGET_ONLY


def _key(item: Measured) -> tuple[int, str]:
    """Batch size and policy of a way that differs from others in the placement alone."""
    order = item.method.order
    return item.method.batch_size, "" if order is None else order.choice.label


def _reference(items: dict[int, Measured]) -> list[list[int]]:
    return items[min(items)].completions[0]


def _overlap(item: Measured, in_turns: Measured | None) -> OverlapResult | None:
    """Of specdist with a draft, wherever the draft was run on a rank of its own too."""
    order, stats = item.method.order, item.stats
    if in_turns is None or order is None or not order.max_draft_tokens:
        return None
    assert stats is not None
    return overlap_of(stats, order, _ratio_to(in_turns, item))


def _policy(item: Measured) -> PolicyResult | None:
    order, placement = item.method.order, item.method.placement
    if order is None or placement is None or _is_target_only(item):
        return None
    choice = order.choice
    return PolicyResult(
        policy=choice.policy,
        options=dict(choice.options),
        family=choice.family,
        first_length=choice.first_length,
        placement=placement,
        num_ahead_tokens=order.ahead.num_tokens,
        num_branches=order.ahead.num_branches,
    )


def _groups(item: Measured, alone: Measured | None) -> list[GroupResult]:
    """Of every group, where there is more than one."""
    if len(item.groups) == 1:
        return []
    results = []
    for name, group in item.groups.items():
        stats = group.generated[-1].stats
        rates = {} if stats is None else stats.summary()
        results.append(
            GroupResult(
                name=name,
                num_rows=group.num_rows,
                seconds=group.seconds,
                num_tokens=group.num_tokens,
                tokens_per_s=group.tokens_per_s,
                ratio_to_target_only=_ratio_to(None if alone is None else alone.groups[name], group),
                verification_rate=rates.get("verification_rate"),
                discard_rate=rates.get("discard_rate"),
                draft_acceptance_rate=rates.get("draft_acceptance_rate"),
            )
        )
    return results


def _ratio_to(base: Measured | Timed | None, item: Measured | Timed) -> float | None:
    return None if base is None else item.tokens_per_s / base.tokens_per_s


def _decoding_ratio_to(base: Measured | None, item: Measured) -> float | None:
    rate, base_rate = item.decoding_tokens_per_s, None if base is None else base.decoding_tokens_per_s
    return None if rate is None or base_rate is None else rate / base_rate


def _num_differing(item: Measured, reference: list[list[int]]) -> int:
    """Rows that differ in any repeat."""
    repeats = item.completions
    return sum(
        any(completions[row] != completion for completions in repeats)
        for row, completion in enumerate(reference)
    )
