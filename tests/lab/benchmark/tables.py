"""A result as tables and remarks: on the console, and in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from specdist.lab.benchmark.report import conditions, methods_table, remarks, title
from specdist.lab.benchmark.results import MethodResult
from specdist.utils.table import NOTHING, Table, decimals
from tests.lab.benchmark.choices import nearest_first_lengths
from tests.lab.benchmark.config import ASYNCHRONOUS, COLOCATED, SEPARATE
from tests.lab.benchmark.results import ComparedMethod, ComparisonResult, GroupResult
from tests.lab.draft_rank import branches_text

POLICIES_REMARK = (
    "x target alone: tokens/s over those of specdist without a draft, with all threads; x decoding: the "
    "same without the prompts' passes; N: completion tokens, so that N_target/N are "
    "target passes of a row per token, and N_discarded/N discarded draft tokens; accepted: "
    "of the draft's tokens."
)
SPREADS_REMARK = (
    "std: over all first lengths; x mean of fixed: mean and std in units of the mean of "
    "fixed-length decoding over the same lengths, as in Table 2 of Gautam et al. 2025."
)
OVERHEAD_REMARK = (
    "A round of both models in one process, without prompts: features are timed after single passes "
    "of the draft, policies by a stopwatch around their calls; the runs of a pair draft the same tokens."
)
PER_DEVICE_REMARK = (
    "A draft on a rank of its own has a GPU, or on a CPU a core, that the target alone has not: ratios to "
    "what runs without it are per GPU or core, half of what the tokens/s say."
)
SHARED_THREADS_REMARK = "A draft on a rank of its own has half of the threads, and the target the others."
OVERLAP_REMARK = (
    "x separate: over the draft on a rank of its own that takes turns with the target; ready: row-rounds "
    "that found candidates, beside what the measured acceptance and misses caught predict for endless rows; "
    "by rank: misses caught by the likeliest alternative, the next, ..."
)


def console_report(result: ComparisonResult) -> str:
    """All tables and remarks, in plain text."""
    return "\n\n".join(
        [title(result), _conditions(result), *_tables(result, Table.console), *_remarks(result)]
    )


def markdown_report(result: ComparisonResult, *, is_brief: bool = False) -> str:
    """The same as a section of a Markdown document; ``is_brief``: the first table and remark alone."""
    hardware = result.hardware
    where = [hardware.gpu] if hardware.gpu else []
    where += [f"{hardware.cpu}, {hardware.num_cores} cores, {hardware.num_threads} threads"]
    versions = result.versions | result.peer_versions
    where += [f"{name} {number}" for name, number in versions.items() if number is not None]
    origin = f"{'; '.join(where)}; {result.date}:\n`{result.command}`"
    shown = slice(1) if is_brief else slice(None)
    blocks = [*list(_tables(result, Table.markdown))[shown], *_remarks(result)[shown]]
    return "\n\n".join([f"**{title(result)}**", _conditions(result), *blocks, origin])


def _conditions(result: ComparisonResult) -> str:
    drafts = [] if result.is_of_policies else [f"K = {result.settings['num_draft_tokens']} draft tokens"]
    return conditions(result, *drafts, groups=len(result.methods[0].groups))


def _tables(result: ComparisonResult, render: Callable[[Table], str]) -> Iterator[str]:
    """The tables that are not empty, each but the first after a heading."""
    if result.is_of_policies:
        yield render(policies_table(result))
    else:
        yield render(methods_table(result, lambda method: num_devices(result, _placement(method))))
    for heading, table_of in MORE_TABLES.items():
        table = table_of(result)
        if table.rows:
            yield heading
            yield render(table)


def _remarks(result: ComparisonResult) -> list[str]:
    is_apart = any(method.overlap is not None for method in result.methods)
    has_more = num_devices(result, SEPARATE) > 1
    found = (
        (SPREADS_REMARK, bool(result.spreads)),
        (OVERHEAD_REMARK, bool(result.policy_overhead)),
        (OVERLAP_REMARK, is_apart),
        (PER_DEVICE_REMARK if has_more else SHARED_THREADS_REMARK, is_apart),
    )
    more = [remark for remark, applies in found if applies]
    return [*([POLICIES_REMARK] if result.is_of_policies else []), *remarks(result, *more)]


def num_devices(result: ComparisonResult, placement: str | None) -> int:
    """GPUs of a method, or on a CPU its cores in units of those of the target alone. A draft on a rank of its
    own has one more; but where there are threads enough, it has half of them."""
    has_more = result.hardware.gpu is not None or result.hardware.num_threads == 1
    return 2 if has_more and placement in (SEPARATE, ASYNCHRONOUS) else 1


def _per_device(result: ComparisonResult, method: ComparedMethod, ratio: float | None) -> str | None:
    """Ratios to what runs on one device: per device."""
    return decimals(None if ratio is None else ratio / num_devices(result, _placement(method)))


def _placement(method: MethodResult) -> str | None:
    return method.policy.placement if isinstance(method, ComparedMethod) and method.policy else None


def policies_table(result: ComparisonResult) -> Table:
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
                "N_target/N": decimals(passes := method.statistic("verification_rate"), 3),
                "N_discarded/N": decimals(method.statistic("discard_rate"), 3),
                "tokens/row pass": decimals(1 / passes if passes else None),
                "accepted": decimals(method.statistic("draft_acceptance_rate")),
                "rows differing": method.num_rows_differing,
            }
            for method in _shown_methods(result)
        ]
    )


def spreads_table(result: ComparisonResult) -> Table:
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


def groups_table(result: ComparisonResult) -> Table:
    """Speed-ups over the target alone by group of rows. Methods that differ in the first length alone share a
    row of the mean and the standard deviation."""
    averaged = {
        (spread.family, spread.placement, spread.batch_size): spread.first_lengths
        for spread in result.spreads
    }
    lines: dict[tuple[str, int, str], list[ComparedMethod]] = {}
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


def overlap_table(result: ComparisonResult) -> Table:
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


def formatted(name: str, columns: Mapping[str, str], result: object) -> Table:
    """One row per dataclass object in the result's field ``name``.

    Args:
        columns: by heading, a format over the item's fields; a time ``x_s`` is there as ``x_ms`` too.
    """
    rows = []
    for item in getattr(result, name):
        fields = vars(item)
        times_ms = {f"{name[:-1]}ms": 1e3 * fields[name] for name in fields if name.endswith("_s")}
        rows.append(
            {heading: text.format(item=item, **fields, **times_ms) for heading, text in columns.items()}
        )
    return Table.of(rows)


def _shown_methods(result: ComparisonResult) -> Iterator[ComparedMethod]:
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


def _in_order(result: ComparisonResult) -> list[ComparedMethod]:
    """By batch size, then by placement, those without a draft first."""
    places: Mapping[str | None, int] = {None: 0, COLOCATED: 1, SEPARATE: 2, ASYNCHRONOUS: 3}
    return sorted(
        result.methods,
        key=lambda method: (method.batch_size, places[_placement(method)]),
    )


def _label(method: ComparedMethod) -> str:
    """The method's name without what other columns say."""
    name, policy = method.name.removeprefix("specdist, "), method.policy
    return name if policy is None or policy.placement == COLOCATED else name.split(", ")[0]


def _draft(method: ComparedMethod) -> str | None:
    """Where the draft runs, and what it does while the target verifies."""
    policy = method.policy
    if policy is None:
        return None
    return policy.placement + branches_text(policy.num_branches)


def _mean_ratio(items: list[ComparedMethod] | list[GroupResult], num_devices: int) -> str | None:
    """Mean speed-up over the target alone per device, with the standard deviation of several."""
    ratios = [
        item.ratio_to_target_only / num_devices for item in items if item.ratio_to_target_only is not None
    ]
    if len(ratios) < 2:
        return decimals(ratios[0] if ratios else None)
    return _plus_minus(statistics.mean(ratios), statistics.pstdev(ratios))


def _plus_minus(mean: float | None, deviation: float | None) -> str | None:
    return None if mean is None or deviation is None else f"{mean:.2f} ± {deviation:.2f}"


MORE_TABLES: Mapping[str, Callable[[ComparisonResult], Table]] = {
    "Times the target alone, by the first draft length of the policies that have one:": spreads_table,
    "Times the target alone, by group:": groups_table,
    "Where the draft runs, and what it does while the target verifies:": overlap_table,
    "Single passes of the target:": partial(
        formatted,
        "overhead",
        {
            "rows x new tokens": "{batch_size} x {num_new_tokens}",
            "context": "{num_context_tokens}",
            "transformers ms": "{transformers_ms:.1f}",
            "specdist ms": "{specdist_ms:.1f}",
            "ratio": "{ratio:.2f}",
        },
    ),
    "Cost of features and policies:": partial(
        formatted,
        "policy_overhead",
        {
            "policy": "{label}",
            "batch": "{batch_size}",
            "round ms": "{round_ms:.2f}",
            "features ms": "{features_ms:.3f}",
            "policy ms": "{policy_ms:.3f}",
            "share of the round": "{share:.2%}",
        },
    ),
    "Cost of features, by pairs of runs with and without them:": partial(
        formatted,
        "feature_overhead",
        {
            "features": "K = {num_draft_tokens}",
            "batch": "{batch_size}",
            "pairs": "{num_pairs}",
            "round ms": "{round_ms:.2f}",
            "more ms": "{extra_ms:.3f}",
            "quartiles": "{lower_ms:.3f} .. {upper_ms:.3f}",
            "share of the round": "{item.share:.2%}",
        },
    ),
    "Cost of a head, beside a draft step without it:": partial(
        formatted,
        "head_overhead",
        {
            "head": "D = {depth}",
            "batch": "{batch_size}",
            "passes": "{num_passes}",
            "draft step ms": "{step_ms:.2f}",
            "head ms": "{head_ms:.3f}",
            "head / step": "{share:.2%}",
            "quartiles": "{lower:.2%} .. {upper:.2%}",
        },
    ),
}
