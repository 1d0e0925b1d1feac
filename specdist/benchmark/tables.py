"""A result as people read it: on the console, and as Markdown for the README."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdist.benchmark.results import BenchmarkResult, MethodResult

NOTHING = "-"
PLACEMENTS = "Where the draft runs, and what it does while the target verifies:"


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is set flush left, the others flush right."""

    header: list[str]
    rows: list[list[str]]

    def console(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if index else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def markdown(self) -> str:
        rule = ["---", *(["---:"] * (len(self.header) - 1))]
        return "\n".join(f"| {' | '.join(line)} |" for line in [self.header, rule, *self.rows])


def console_report(result: BenchmarkResult) -> str:
    """Everything, in plain text."""
    blocks = [title(result), _conditions(result), methods_table(result).console()]
    if (overlap := overlap_table(result)).rows:
        blocks += [PLACEMENTS, overlap.console()]
    if result.overhead:
        blocks += ["Single passes of the target:", overhead_table(result).console()]
    return "\n\n".join([*blocks, *_remarks(result)])


def markdown_report(result: BenchmarkResult) -> str:
    """Everything, as a section of a Markdown document."""
    hardware = result.hardware
    blocks = [f"**{title(result)}**", _conditions(result), methods_table(result).markdown()]
    if (overlap := overlap_table(result)).rows:
        blocks += [PLACEMENTS, overlap.markdown()]
    if result.overhead:
        blocks += ["Single passes of the target:", overhead_table(result).markdown()]
    where = [hardware.gpu] if hardware.gpu else []
    where += [f"{hardware.cpu}, {hardware.num_cores} cores, {hardware.num_threads} threads"]
    where += [f"{name} {number}" for name, number in result.versions.items()]
    origin = f"{'; '.join(where)}; {result.date}:\n`{result.command}`"
    return "\n\n".join([*blocks, *_remarks(result), origin])


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
                _ratio(method.ratio_to_assisted),
                _ratio(method.ratio_to_generate),
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
                _ratio(overlap.ratio_to_separate),
                _ratio(overlap.tokens_per_row_pass),
                _ratio(overlap.ready_share),
                _ratio(overlap.predicted_ready_share),
                _ratio(overlap.miss_catch_rate) if overlap.num_branches else NOTHING,
                " ".join(map(str, overlap.num_hits_per_rank)) or NOTHING,
                _ratio(overlap.target_idle_share),
                _ratio(overlap.draft_idle_share),
            ]
            for method in sorted(result.methods, key=lambda method: method.batch_size)
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
    return (
        f"{work.num_rows} rows; prompts of {work.shortest_prompt} to {work.longest_prompt} tokens, "
        f"completions of at most {work.shortest_limit} to {work.longest_limit}; {sampling}; "
        f"K = {settings['num_draft_tokens']} draft tokens; repeats, taken in turn: {settings['repeats']}"
    )


def _remarks(result: BenchmarkResult) -> list[str]:
    remarks = [
        "x assisted: tokens/s over those of transformers' assisted generation, which has batch 1 only; "
        "x generate: over transformers' generate at the same batch; accepted: of the draft's tokens."
    ]
    if overlap_table(result).rows:
        remarks.append(
            "x separate: over the draft on a rank of its own that works in turns with the target (each has "
            "half of the threads); ready: row-rounds that found candidates, beside what the measured "
            "acceptance and misses caught predict for rows without end; by rank: misses caught by the "
            "likeliest alternative, the next, ..."
        )
    if _differing(result.methods) and result.models.dtype == "float32":
        remarks.append(
            "Rows differ from transformers' generate in float32: near-ties may, anything else is a bug."
        )
    if result.synthetic is not None:
        remarks.append("The pair is synthetic: random weights, whose text means nothing.")
    return remarks


def _differing(methods: Sequence[MethodResult]) -> int | None:
    counts = [method.num_rows_differing for method in methods if method.num_rows_differing is not None]
    return max(counts, default=None)


def _acceptance(method: MethodResult) -> list[str]:
    """Share of the draft's tokens that were accepted, and what a row gets from a target pass behind them."""
    statistics = method.statistics or {}
    return [_ratio(statistics.get(name)) for name in ("draft_acceptance_rate", "mean_acceptance_length")]


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _count(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"
