"""A result as people read it: on the console, and as Markdown for the README."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specdist.benchmark.policy_tables import (
    feature_overhead_table,
    groups_table,
    head_overhead_table,
    policies_table,
    policy_overhead_table,
    shown_methods,
    spreads_table,
)
from specdist.benchmark.results import BenchmarkResult, MethodResult
from specdist.benchmark.table import NOTHING, Table, decimals

TRANSFORMERS_REMARK = (
    "x assisted: tokens/s over those of transformers' assisted generation, which has batch 1 only; "
    "x generate: over transformers' generate at the same batch; accepted: of the draft's tokens."
)
LENGTHS = "Times the target alone, by the first draft length of the policies that have one:"
GROUPS = "Times the target alone, by group:"
PASSES = "Single passes of the target:"
PARTS = "What features and policies take:"
WHOLE = "What features take, by pairs of runs with and without them:"
HEAD = "What a head takes, beside a draft step without it:"
PLACEMENTS = "Where the draft runs, and what it does while the target verifies:"


def console_report(result: BenchmarkResult) -> str:
    """Everything, in plain text."""
    blocks = [title(result), _conditions(result), *_sections(result, Table.console), *_remarks(result)]
    return "\n\n".join(blocks)


def markdown_report(result: BenchmarkResult, *, is_brief: bool = False) -> str:
    """Everything, as a section of a Markdown document; or its first table alone."""
    hardware = result.hardware
    where = [hardware.gpu] if hardware.gpu else []
    where += [f"{hardware.cpu}, {hardware.num_cores} cores, {hardware.num_threads} threads"]
    where += [f"{name} {number}" for name, number in result.versions.items()]
    origin = f"{'; '.join(where)}; {result.date}:\n`{result.command}`"
    tables = list(_sections(result, Table.markdown))
    blocks = [f"**{title(result)}**", _conditions(result), *(tables[:1] if is_brief else tables)]
    if is_brief:
        return "\n\n".join([*blocks, *_remarks(result)[:1], origin])
    return "\n\n".join([*blocks, *_remarks(result), origin])


def _sections(result: BenchmarkResult, render: Callable[[Table], str]) -> Iterator[str]:
    """The tables that are not empty, behind what they are about."""
    first = policies_table(result) if _is_of_policies(result) else methods_table(result)
    yield render(first)
    for heading, table in (
        (LENGTHS, spreads_table(result)),
        (GROUPS, groups_table(result)),
        (PLACEMENTS, overlap_table(result)),
        (PASSES, overhead_table(result)),
        (PARTS, policy_overhead_table(result)),
        (WHOLE, feature_overhead_table(result)),
        (HEAD, head_overhead_table(result)),
    ):
        if table.rows:
            yield heading
            yield render(table)


def _is_of_policies(result: BenchmarkResult) -> bool:
    return result.settings.get("policies") is not None


def title(result: BenchmarkResult) -> str:
    """What was measured; a synthetic pair is called one."""
    models, record = result.models, result.synthetic
    sizes = f"{_count(models.num_target_parameters)} target, {_count(models.num_draft_parameters)} draft"
    if record is None:
        return f"{models.target} with draft {models.draft} ({sizes}), {models.dtype}"
    agreement = f"epsilon {record.epsilon:.4f}"
    if record.measured_acceptance is not None:
        agreement += f", measured greedy acceptance {record.measured_acceptance:.2f}"
    return f"Synthetic pair {record.shape} of random weights ({sizes}; {agreement}), {models.dtype}"


def methods_table(result: BenchmarkResult) -> Table:
    """One row per method and batch size."""
    return Table(
        [
            "method",
            "batch",
            "tokens/s",
            "x assisted",
            "x generate",
            "accepted",
            "tokens/pass",
            "rows differing",
        ],
        [
            [
                method.name,
                str(method.batch_size),
                f"{method.tokens_per_s:.1f}",
                decimals(method.ratio_to_assisted),
                decimals(method.ratio_to_generate),
                *_acceptance(method),
                NOTHING if method.num_rows_differing is None else str(method.num_rows_differing),
            ]
            for method in sorted(result.methods, key=lambda method: method.batch_size)
        ],
    )


def overlap_table(result: BenchmarkResult) -> Table:
    """One row per way of running specdist's draft; none where it ran in the target's process alone."""
    return Table(
        [
            "draft",
            "batch",
            "tokens/s",
            "x separate",
            "tokens/row pass",
            "ready",
            "predicted",
            "misses caught",
            "by rank",
            "target idle",
            "draft idle",
        ],
        [
            [
                method.name.removeprefix("specdist, "),
                str(method.batch_size),
                f"{method.tokens_per_s:.1f}",
                decimals(overlap.ratio_to_separate),
                decimals(overlap.tokens_per_row_pass),
                decimals(overlap.ready_share),
                decimals(overlap.predicted_ready_share),
                decimals(overlap.miss_catch_rate) if overlap.num_branches else NOTHING,
                " ".join(map(str, overlap.num_hits_per_rank)) or NOTHING,
                decimals(overlap.target_idle_share),
                decimals(overlap.draft_idle_share),
            ]
            for method in shown_methods(result)
            if (overlap := method.overlap) is not None
        ],
    )


def overhead_table(result: BenchmarkResult) -> Table:
    """One row per kind of pass."""
    return Table(
        ["rows x new tokens", "context", "transformers ms", "specdist ms", "ratio"],
        [
            [
                f"{item.batch_size} x {item.num_new_tokens}",
                str(item.num_context_tokens),
                f"{1e3 * item.transformers_s:.1f}",
                f"{1e3 * item.specdist_s:.1f}",
                f"{item.ratio:.2f}",
            ]
            for item in result.overhead
        ],
    )


def summary(result: BenchmarkResult) -> dict[str, Any]:
    """The figures of the job's last line."""
    record = result.synthetic
    return {
        "output": result.settings["output"],
        "synthetic": record is not None,
        "measured_acceptance": record.measured_acceptance if record else None,
        "tokens_per_s": {
            f"{method.name}, batch {method.batch_size}": round(method.tokens_per_s, 2)
            for method in result.methods
        },
        "num_rows_differing": _differing(result.methods),
    }


def _conditions(result: BenchmarkResult) -> str:
    work, settings = result.work, result.settings
    sampling = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    if settings.get("acceptance_rule") == "gumbel":
        sampling += ", gumbel"
    groups = len(result.methods[0].groups)
    rows = f"{work.num_rows} rows" + (f" in {groups} groups, each timed by itself" if groups else "")
    drafts = "" if _is_of_policies(result) else f"K = {settings['num_draft_tokens']} draft tokens; "
    return (
        f"{rows}; prompts of {work.shortest_prompt} to {work.longest_prompt} tokens, "
        f"completions of at most {work.shortest_limit} to {work.longest_limit}; {sampling}; "
        f"{drafts}repeats, taken in turn: {len(result.methods[0].seconds)}"
    )


def _remarks(result: BenchmarkResult) -> list[str]:
    remarks = _policy_remarks(result) if _is_of_policies(result) else [TRANSFORMERS_REMARK]
    if overlap_table(result).rows:
        remarks.append(
            "x separate: over the draft on a rank of its own that works in turns with the target (each has "
            "half of the threads); ready: row-rounds that found candidates, beside what the measured "
            "acceptance and misses caught predict for rows without end; by rank: misses caught by the "
            "likeliest alternative, the next, ..."
        )
    if _differing(result.methods) and result.models.dtype == "float32":
        reference = "the target alone" if _is_of_policies(result) else "transformers' generate"
        remarks.append(f"Rows differ from {reference} in float32: near-ties may, anything else is a bug.")
    if result.synthetic is not None:
        remarks.append("The pair is synthetic: random weights, whose text means nothing.")
    return remarks


def _policy_remarks(result: BenchmarkResult) -> list[str]:
    remarks = [
        "x target alone: tokens/s over those of specdist without a draft, with all threads; x decoding: the "
        "same with prompts' passes left out of both times; N: completion tokens, so that N_target/N are "
        "target passes of a row per token, and N_discarded/N draft tokens that were drawn in vain; accepted: "
        "of the draft's tokens."
    ]
    if result.spreads:
        remarks.append(
            "std: over the first lengths, all of them; x mean of fixed: mean and std in units of the mean of "
            "fixed-length decoding over the same lengths, as in Table 2 of Gautam et al. 2025."
        )
    if result.policy_overhead:
        remarks.append(
            "A round of both models in one process, prompts aside: features are timed behind single passes "
            "of the draft, policies by a stopwatch around their calls; the runs of a pair draft the same "
            "tokens."
        )
    return remarks


def _differing(methods: Sequence[MethodResult]) -> int | None:
    counts = [method.num_rows_differing for method in methods if method.num_rows_differing is not None]
    return max(counts, default=None)


def _acceptance(method: MethodResult) -> list[str]:
    """Share of the draft's tokens that were accepted, and what a row gets from a target pass behind them."""
    statistics = method.statistics or {}
    return [decimals(statistics.get(name)) for name in ("draft_acceptance_rate", "mean_acceptance_length")]


def _count(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"
