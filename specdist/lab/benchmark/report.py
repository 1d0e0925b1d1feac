"""A result as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdist.lab.benchmark.results import BenchmarkResult, MethodResult
from specdist.utils.table import Table, decimals

TRANSFORMERS_REMARK = (
    "x assisted: tokens/s over those of transformers' assisted generation, which has batch 1 only; "
    "x generate: over transformers' generate at the same batch; accepted: of the draft's tokens."
)
PEERS_REMARK = (
    "{heading}: tokens/s over those of the fastest of its methods at the same batch. It runs in a "
    "process of its own, with as many threads, and waits while others are measured. x target alone: over "
    "those of specdist without a draft; accepted: of the draft's tokens."
)

DEFAULT_REMARK = "default over it: tokens/s of specdist's default, goodput, over those of the row."


def console_report(result: BenchmarkResult) -> str:
    """The table and remarks, in plain text."""
    drafts = f"K = {result.settings['num_draft_tokens']} draft tokens"
    table = methods_table(result).console()
    found = {name: number for name, number in (result.versions | result.peer_versions).items() if number}
    versions = ", ".join(f"{name} {number}" for name, number in found.items())
    return "\n\n".join([title(result), conditions(result, drafts), table, *remarks(result), versions])


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
        "num_rows_differing": result.most_rows_differing,
    }


def methods_table(
    result: BenchmarkResult, num_devices: Callable[[MethodResult], int] = lambda method: 1
) -> Table:
    """One row per method and batch size. ``num_devices``: of a method, in units of those of the target alone;
    ratios are per device."""
    beside = (
        {
            "x assisted": "ratio_to_assisted",
            "x generate": "ratio_to_generate",
        }
        if has_transformers(result)
        else {}
    )
    if any(method.ratio_to_peer is not None for method in result.methods):
        beside |= {_peers_heading(result): "ratio_to_peer", "x target alone": "ratio_to_target_only"}
    if any(method.default_ratio is not None for method in result.methods):
        beside["default over it"] = "default_ratio"

    def ratio(method: MethodResult, name: str) -> str | None:
        found: float | None = getattr(method, name)
        return decimals(None if found is None else found / num_devices(method))

    return Table.of(
        [
            {
                "method": method.name,
                "batch": method.batch_size,
                "tokens/s": f"{method.tokens_per_s:.1f}",
                **{heading: ratio(method, name) for heading, name in beside.items()},
                "accepted": decimals(method.statistic("draft_acceptance_rate")),
                "tokens/pass": decimals(method.statistic("mean_acceptance_length")),
                "rows differing": method.num_rows_differing,
            }
            for method in sorted(result.methods, key=lambda method: method.batch_size)
        ]
    )


def _peers_heading(result: BenchmarkResult) -> str:
    return f"x {' or '.join(result.peer_versions)}"


def has_transformers(result: BenchmarkResult) -> bool:
    return any(method.ratio_to_generate is not None for method in result.methods)


def title(result: BenchmarkResult) -> str:
    """The models; a synthetic pair is called one."""
    models, record = result.models, result.synthetic
    sizes = f"{_count(models.num_target_parameters)} target, {_count(models.num_draft_parameters)} draft"
    if record is None:
        return f"{models.target} with draft {models.draft} ({sizes}), {models.dtype}"
    agreement = f"epsilon {record.epsilon:.4f}"
    if record.measured_acceptance is not None:
        agreement += f", measured greedy acceptance {record.measured_acceptance:.2f}"
    return f"Synthetic pair {record.shape} of random weights ({sizes}; {agreement}), {models.dtype}"


def conditions(result: BenchmarkResult, *more: str, groups: int = 0) -> str:
    """Rows, lengths and sampling. ``groups``: how many of them were timed separately."""
    work, settings = result.work, result.settings
    sampling = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    if settings.get("top_k"):
        sampling += f", top_k {settings['top_k']}"
    if settings.get("top_p", 1) < 1:
        sampling += f", top_p {settings['top_p']:g}"
    if settings.get("acceptance_rule") == "gumbel":
        sampling += ", gumbel"
    parts = [
        f"{work.num_rows} rows" + (f" in {groups} groups, each timed separately" if groups else ""),
        f"prompts of {work.shortest_prompt} to {work.longest_prompt} tokens, completions of at most "
        f"{work.shortest_limit} to {work.longest_limit}",
        sampling,
        *more,
        f"repeats, taken in turn: {len(result.methods[0].seconds)}",
    ]
    return "; ".join(parts)


def remarks(result: BenchmarkResult, *of_tables: str) -> list[str]:
    """What the columns mean, and what a reader should know. ``of_tables``: about more tables."""
    reference = "transformers' generate" if has_transformers(result) else "the target alone"
    differs = bool(result.most_rows_differing) and result.models.dtype == "float32"
    found = (
        (TRANSFORMERS_REMARK, has_transformers(result)),
        (PEERS_REMARK.format(heading=_peers_heading(result)), bool(result.peer_versions)),
        (DEFAULT_REMARK, any(method.default_ratio is not None for method in result.methods)),
        *((remark, True) for remark in of_tables),
        (f"Rows differ from {reference} in float32: near-ties may, anything else is a bug.", differs),
        ("The pair is synthetic: random weights, whose text means nothing.", result.synthetic is not None),
    )
    return [remark for remark, applies in found if applies]


def _count(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"
