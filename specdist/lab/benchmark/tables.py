"""The tables of a result."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from specdist.lab.benchmark.choices import nearest_first_lengths
from specdist.lab.benchmark.config import AHEAD, COLOCATED, SEPARATE
from specdist.lab.benchmark.results import BenchmarkResult, GroupResult, MethodResult
from specdist.lab.benchmark.sides.drafts import branches_text
from specdist.utils.table import NOTHING, Table, decimals


def methods_table(result: BenchmarkResult) -> Table:
    """One row per method and batch size."""
    has_peers = any(method.ratio_to_peer is not None for method in result.methods)
    has_transformers = any(method.ratio_to_generate is not None for method in result.methods)
    return Table.of(
        [
            {
                "method": method.name,
                "batch": method.batch_size,
                "tokens/s": f"{method.tokens_per_s:.1f}",
                **(_beside_transformers(result, method) if has_transformers else {}),
                **(_beside_peers(result, method) if has_peers else {}),
                "accepted": decimals(_statistic(method, "draft_acceptance_rate")),
                "tokens/pass": decimals(_statistic(method, "mean_acceptance_length")),
                "rows differing": method.num_rows_differing,
            }
            for method in sorted(result.methods, key=lambda method: method.batch_size)
        ]
    )


def num_devices(result: BenchmarkResult, placement: str | None) -> int:
    """GPUs of a method, or on a CPU its cores in units of those of the target alone. A draft on a rank of its
    own has one more; but where there are threads enough, it has half of them."""
    has_more = result.hardware.gpu is not None or result.hardware.num_threads == 1
    return 2 if has_more and placement in (SEPARATE, AHEAD) else 1


def _per_device(result: BenchmarkResult, method: MethodResult, ratio: float | None) -> str | None:
    """Ratios to what runs on one device: per device."""
    placement = None if method.policy is None else method.policy.placement
    return decimals(None if ratio is None else ratio / num_devices(result, placement))


def _beside_transformers(result: BenchmarkResult, method: MethodResult) -> dict[str, str | None]:
    return {
        "x assisted": _per_device(result, method, method.ratio_to_assisted),
        "x generate": _per_device(result, method, method.ratio_to_generate),
    }


def _beside_peers(result: BenchmarkResult, method: MethodResult) -> dict[str, str | None]:
    return {
        "x vLLM": _per_device(result, method, method.ratio_to_peer),
        "x target alone": _per_device(result, method, method.ratio_to_target_only),
    }


def policies_table(result: BenchmarkResult) -> Table:
    """One row per policy, placement and batch size, and the target alone."""
    return Table.of(
        [
            {
                "policy": _label(method),
                "batch": method.batch_size,
                "draft": _draft(method),
                "tokens/s": f"{method.tokens_per_s:.1f}",
                "x target alone": _per_device(result, method, method.ratio_to_target_only),
                "x decoding": _per_device(result, method, method.decoding_ratio_to_target_only),
                "N_target/N": decimals(passes := _statistic(method, "verification_rate"), 3),
                "N_discarded/N": decimals(_statistic(method, "discard_rate"), 3),
                "tokens/row pass": decimals(1 / passes if passes else None),
                "accepted": decimals(_statistic(method, "draft_acceptance_rate")),
                "rows differing": method.num_rows_differing,
            }
            for method in _shown_methods(result)
        ]
    )


def spreads_table(result: BenchmarkResult) -> Table:
    """Speed-ups by the first length: one row per policy that has one, placement and batch size."""
    lengths = sorted({length for spread in result.spreads for length in spread.first_lengths})
    rows = []
    for spread in sorted(result.spreads, key=lambda spread: spread.batch_size):
        share = 1 / num_devices(result, spread.placement)
        ratios = {
            length: share * ratio for length, ratio in zip(spread.first_lengths, spread.ratios, strict=True)
        }
        rows.append(
            {
                "policy": spread.family,
                "batch": spread.batch_size,
                "draft": spread.placement,
                **{str(length): decimals(ratios.get(length)) for length in lengths},
                "mean": decimals(share * spread.mean),
                "std": decimals(share * spread.deviation, 3),
                "max - min": decimals(share * spread.range),
                "x mean of fixed": _plus_minus(spread.mean_to_fixed, spread.deviation_to_fixed),
            }
        )
    return Table.of(rows)


def groups_table(result: BenchmarkResult) -> Table:
    """Speed-ups over the target alone by group of rows. Methods that differ in the first length alone share a
    row of the mean and the standard deviation."""
    averaged = {
        (spread.family, spread.placement, spread.batch_size): spread.first_lengths
        for spread in result.spreads
    }
    lines: dict[tuple[str, int, str], list[MethodResult]] = {}
    for method in _in_order(result):
        policy, label, placement = method.policy, _label(method), NOTHING
        if policy is not None:
            placement = policy.placement
            lengths = averaged.get((policy.family, placement, method.batch_size), [])
            label = policy.family if policy.first_length in lengths else label
        lines.setdefault((label, method.batch_size, placement), []).append(method)
    names = [(index, group.name) for index, group in enumerate(result.methods[0].groups)]
    return Table.of(
        [
            {
                "method": label,
                "batch": batch_size,
                "draft": placement,
                **{
                    name: _mean_ratio(
                        [method.groups[index] for method in methods], num_devices(result, placement)
                    )
                    for index, name in names
                },
                "all": _mean_ratio(methods, num_devices(result, placement)),
            }
            for (label, batch_size, placement), methods in lines.items()
            if names
        ]
    )


def overlap_table(result: BenchmarkResult) -> Table:
    """One row per way of running specdist's draft; none where it ran in the target's process alone."""
    return Table.of(
        [
            {
                "draft": method.name.removeprefix("specdist, "),
                "batch": method.batch_size,
                "tokens/s": f"{method.tokens_per_s:.1f}",
                "x separate": decimals(overlap.ratio_to_separate),
                "tokens/row pass": decimals(overlap.tokens_per_row_pass),
                "ready": decimals(overlap.ready_share),
                "predicted": decimals(overlap.predicted_ready_share),
                "misses caught": decimals(overlap.miss_catch_rate if overlap.num_branches else None),
                "by rank": " ".join(map(str, overlap.num_hits_per_rank)) or None,
                "target idle": decimals(overlap.target_idle_share),
                "draft idle": decimals(overlap.draft_idle_share),
            }
            for method in _shown_methods(result)
            if (overlap := method.overlap) is not None
        ]
    )


def passes_table(result: BenchmarkResult) -> Table:
    """One row per kind of pass."""
    return _formatted(
        result.overhead,
        {
            "rows x new tokens": "{batch_size} x {num_new_tokens}",
            "context": "{num_context_tokens}",
            "transformers ms": "{transformers_ms:.1f}",
            "specdist ms": "{specdist_ms:.1f}",
            "ratio": "{ratio:.2f}",
        },
    )


def policy_overhead_table(result: BenchmarkResult) -> Table:
    """One row per policy and batch size, by parts."""
    return _formatted(
        result.policy_overhead,
        {
            "policy": "{label}",
            "batch": "{batch_size}",
            "round ms": "{round_ms:.2f}",
            "features ms": "{features_ms:.3f}",
            "policy ms": "{policy_ms:.3f}",
            "share of the round": "{share:.2%}",
        },
    )


def feature_overhead_table(result: BenchmarkResult) -> Table:
    """One row per batch size, as a whole."""
    return _formatted(
        result.feature_overhead,
        {
            "features": "K = {num_draft_tokens}",
            "batch": "{batch_size}",
            "pairs": "{num_pairs}",
            "round ms": "{round_ms:.2f}",
            "more ms": "{extra_ms:.3f}",
            "quartiles": "{lower_ms:.3f} .. {upper_ms:.3f}",
            "share of the round": "{item.share:.2%}",
        },
    )


def head_overhead_table(result: BenchmarkResult) -> Table:
    """One row per batch size and depth."""
    return _formatted(
        result.head_overhead,
        {
            "head": "D = {depth}",
            "batch": "{batch_size}",
            "passes": "{num_passes}",
            "draft step ms": "{step_ms:.2f}",
            "head ms": "{head_ms:.3f}",
            "head / step": "{share:.2%}",
            "quartiles": "{lower:.2%} .. {upper:.2%}",
        },
    )


def _formatted(items: Sequence[object], columns: Mapping[str, str]) -> Table:
    """One row per dataclass object.

    Args:
        columns: by heading, a format over the item's fields; a time ``x_s`` is there as ``x_ms`` too.
    """
    rows = []
    for item in items:
        fields = vars(item)
        times_ms = {f"{name[:-1]}ms": 1e3 * fields[name] for name in fields if name.endswith("_s")}
        rows.append(
            {heading: text.format(item=item, **fields, **times_ms) for heading, text in columns.items()}
        )
    return Table.of(rows)


def _shown_methods(result: BenchmarkResult) -> Iterator[MethodResult]:
    """By batch size and placement; of methods that differ in the first length alone, the nearest to
    ``--num_draft_tokens``."""
    policies = [method.policy for method in result.methods if method.policy is not None]
    shown = nearest_first_lengths(
        ((policy.family, policy.first_length) for policy in policies), result.settings["num_draft_tokens"]
    )
    for method in _in_order(result):
        policy = method.policy
        if policy is None or policy.first_length == shown[policy.family]:
            yield method


def _in_order(result: BenchmarkResult) -> list[MethodResult]:
    """By batch size, then by placement, those without a draft first."""
    places: Mapping[str | None, int] = {None: 0, COLOCATED: 1, SEPARATE: 2, AHEAD: 3}
    return sorted(
        result.methods,
        key=lambda method: (method.batch_size, places[method.policy.placement if method.policy else None]),
    )


def _label(method: MethodResult) -> str:
    """The method's name without what other columns say."""
    name, policy = method.name.removeprefix("specdist, "), method.policy
    return name if policy is None or policy.placement == COLOCATED else name.split(", ")[0]


def _draft(method: MethodResult) -> str | None:
    """Where the draft runs, and what it does while the target verifies."""
    policy = method.policy
    if policy is None:
        return None
    return policy.placement + branches_text(policy.num_branches)


def _statistic(method: MethodResult, name: str) -> float | None:
    return (method.statistics or {}).get(name)


def _mean_ratio(items: list[MethodResult] | list[GroupResult], num_devices: int) -> str | None:
    """Mean speed-up over the target alone per device, with the standard deviation of several."""
    ratios = [
        item.ratio_to_target_only / num_devices for item in items if item.ratio_to_target_only is not None
    ]
    if len(ratios) < 2:
        return decimals(ratios[0] if ratios else None)
    return _plus_minus(statistics.mean(ratios), statistics.pstdev(ratios))


def _plus_minus(mean: float | None, deviation: float | None) -> str | None:
    return None if mean is None or deviation is None else f"{mean:.2f} ± {deviation:.2f}"
