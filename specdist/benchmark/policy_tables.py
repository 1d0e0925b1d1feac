"""Tables of length policies side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from specdist.benchmark.config import AHEAD, COLOCATED, SEPARATE
from specdist.benchmark.results import BenchmarkResult, GroupResult, MethodResult, PolicyResult
from specdist.benchmark.spread import nearest_first_lengths
from specdist.benchmark.table import NOTHING, Table, decimals

ALL_ROWS = "all"


def policies_table(result: BenchmarkResult) -> Table:
    """One row per policy, placement and batch size, and the target alone."""
    return Table(
        [
            "policy",
            "batch",
            "draft",
            "tokens/s",
            "x target alone",
            "x decoding",
            "N_target/N",
            "N_discarded/N",
            "tokens/row pass",
            "accepted",
            "rows differing",
        ],
        [
            [
                method_label(method),
                str(method.batch_size),
                NOTHING if method.policy is None else _draft(method.policy),
                f"{method.tokens_per_s:.1f}",
                decimals(method.ratio_to_target_only),
                decimals(method.decoding_ratio_to_target_only),
                *_rates(method),
                NOTHING if method.num_rows_differing is None else str(method.num_rows_differing),
            ]
            for method in shown_methods(result)
        ],
    )


def spreads_table(result: BenchmarkResult) -> Table:
    """One row per policy with a first length, placement and batch size."""
    lengths = sorted({length for spread in result.spreads for length in spread.first_lengths})
    rows = []
    for spread in sorted(result.spreads, key=lambda spread: spread.batch_size):
        ratios = dict(zip(spread.first_lengths, spread.ratios, strict=True))
        rows.append(
            [
                spread.family,
                str(spread.batch_size),
                spread.placement,
                *(decimals(ratios.get(length)) for length in lengths),
                decimals(spread.mean),
                decimals(spread.deviation, 3),
                decimals(spread.range),
                _plus_minus(spread.mean_to_fixed, spread.deviation_to_fixed),
            ]
        )
    return Table(
        ["policy", "batch", "draft", *map(str, lengths), "mean", "std", "max - min", "x mean of fixed"], rows
    )


def groups_table(result: BenchmarkResult) -> Table:
    """Speed-ups over the target alone by group: one row per method; of those that differ in the first length
    alone, mean and standard deviation."""
    lengths = {
        (spread.family, spread.placement, spread.batch_size): spread.first_lengths
        for spread in result.spreads
    }
    lines: dict[tuple[str, int, str], list[MethodResult]] = {}
    for method in _in_order(result):
        policy = method.policy
        if policy is None:
            lines.setdefault((method_label(method), method.batch_size, NOTHING), []).append(method)
            continue
        averaged = lengths.get((policy.family, policy.placement, method.batch_size), [])
        label = policy.family if policy.first_length in averaged else method_label(method)
        lines.setdefault((label, method.batch_size, policy.placement), []).append(method)
    names = [group.name for group in result.methods[0].groups]
    return Table(
        ["method", "batch", "draft", *names, ALL_ROWS],
        [
            [
                label,
                str(batch_size),
                placement,
                *(_averaged([_group(method, name) for method in methods]) for name in names),
                _averaged(methods),
            ]
            for (label, batch_size, placement), methods in lines.items()
        ]
        if names
        else [],
    )


def policy_overhead_table(result: BenchmarkResult) -> Table:
    """One row per policy and batch size, by parts."""
    return Table(
        ["policy", "batch", "round ms", "features ms", "policy ms", "share of the round"],
        [
            [
                item.label,
                str(item.batch_size),
                f"{1e3 * item.round_s:.2f}",
                f"{1e3 * item.features_s:.3f}",
                f"{1e3 * item.policy_s:.3f}",
                f"{item.share:.2%}",
            ]
            for item in result.policy_overhead
        ],
    )


def feature_overhead_table(result: BenchmarkResult) -> Table:
    """One row per batch size, as a whole."""
    return Table(
        ["features", "batch", "pairs", "round ms", "more ms", "quartiles", "share of the round"],
        [
            [
                f"K = {item.num_draft_tokens}",
                str(item.batch_size),
                str(item.num_pairs),
                f"{1e3 * item.round_s:.2f}",
                f"{1e3 * item.extra_s:.3f}",
                f"{1e3 * item.lower_s:.3f} .. {1e3 * item.upper_s:.3f}",
                f"{item.extra_s / item.round_s:.2%}",
            ]
            for item in result.feature_overhead
        ],
    )


def head_overhead_table(result: BenchmarkResult) -> Table:
    """One row per batch size."""
    return Table(
        ["batch", "passes", "draft step ms", "head ms", "head / step", "quartiles"],
        [
            [
                str(item.batch_size),
                str(item.num_passes),
                f"{1e3 * item.step_s:.2f}",
                f"{1e3 * item.head_s:.3f}",
                f"{item.share:.2%}",
                f"{item.lower:.2%} .. {item.upper:.2%}",
            ]
            for item in result.head_overhead
        ],
    )


def shown_methods(result: BenchmarkResult) -> Iterator[MethodResult]:
    """By batch size and placement; of those that differ in the first length alone the one nearest to
    ``--num_draft_tokens``."""
    policies = [method.policy for method in result.methods if method.policy is not None]
    shown = nearest_first_lengths(
        ((policy.family, policy.first_length) for policy in policies), result.settings["num_draft_tokens"]
    )
    for method in _in_order(result):
        policy = method.policy
        if policy is None or policy.first_length == shown[policy.family]:
            yield method


def method_label(method: MethodResult) -> str:
    """Its name, without what other columns say."""
    name, policy = method.name.removeprefix("specdist, "), method.policy
    return name if policy is None or policy.placement == COLOCATED else name.split(", ")[0]


def _in_order(result: BenchmarkResult) -> list[MethodResult]:
    """By batch size, then by placement, those without a draft first."""
    places = (None, COLOCATED, SEPARATE, AHEAD)
    return sorted(
        result.methods,
        key=lambda method: (
            method.batch_size,
            places.index(None if method.policy is None else method.policy.placement),
        ),
    )


def _draft(policy: PolicyResult) -> str:
    """Where it is, and what it does meanwhile."""
    count = policy.num_branches
    return policy.placement + (f", {count} branch{'es' * (count > 1)}" if count else "")


def _rates(method: MethodResult) -> list[str]:
    """Target passes and discarded tokens per token, tokens per pass, and the share of draft tokens kept."""
    statistics = method.statistics or {}
    passes = statistics.get("verification_rate")
    return [
        decimals(passes, 3),
        decimals(statistics.get("discard_rate"), 3),
        decimals(1 / passes if passes else None),
        decimals(statistics.get("draft_acceptance_rate")),
    ]


def _group(method: MethodResult, name: str) -> GroupResult:
    return next(group for group in method.groups if group.name == name)


def _averaged(items: list[MethodResult] | list[GroupResult]) -> str:
    """Of their speed-ups."""
    ratios = [item.ratio_to_target_only for item in items if item.ratio_to_target_only is not None]
    if len(ratios) < 2:
        return decimals(ratios[0] if ratios else None)
    return _plus_minus(statistics.mean(ratios), statistics.pstdev(ratios))


def _plus_minus(mean: float | None, deviation: float | None) -> str:
    return NOTHING if mean is None or deviation is None else f"{mean:.2f} ± {deviation:.2f}"
