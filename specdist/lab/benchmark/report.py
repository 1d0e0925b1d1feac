"""A result as text: on the console, and as a generated section of a README."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specdist.data.store.files import write_atomically
from specdist.lab.benchmark import tables
from specdist.lab.benchmark.config import SEPARATE, BenchmarkConfig
from specdist.lab.benchmark.results import BenchmarkResult
from specdist.lab.benchmark.run import run_benchmark
from specdist.lab.benchmark.sides.profile import profile_report, run_profile
from specdist.utils.errors import UserError
from specdist.utils.table import Table

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"

MORE_TABLES: Sequence[tuple[str, Callable[[BenchmarkResult], Table]]] = (
    (
        "Times the target alone, by the first draft length of the policies that have one:",
        tables.spreads_table,
    ),
    ("Times the target alone, by group:", tables.groups_table),
    ("Where the draft runs, and what it does while the target verifies:", tables.overlap_table),
    ("Single passes of the target:", tables.passes_table),
    ("Cost of features and policies:", tables.policy_overhead_table),
    ("Cost of features, by pairs of runs with and without them:", tables.feature_overhead_table),
    ("Cost of a head, beside a draft step without it:", tables.head_overhead_table),
)

TRANSFORMERS_REMARK = (
    "x assisted: tokens/s over those of transformers' assisted generation, which has batch 1 only; "
    "x generate: over transformers' generate at the same batch; accepted: of the draft's tokens."
)
PEERS_REMARK = (
    "x vLLM: tokens/s over those of the better of vLLM's two methods at the same batch. It runs in a "
    "process of its own, with as many threads, and waits while others are measured. x target alone: over "
    "those of specdist without a draft; accepted: of the draft's tokens."
)
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


def benchmark(config: BenchmarkConfig, command: str) -> tuple[str, dict[str, Any]]:
    """Run the job; the text and the document to print. Raises :class:`UserError`."""
    if config.update_readme is not None:
        results = [Path(result) for result in config.results or []]
        update_readme(Path(config.update_readme), results, is_brief=config.brief)
        return "", {"updated": config.update_readme}
    if config.profile is not None:
        profile = run_profile(config, command)
        traces = [run.trace for run in profile.runs]
        text = f"{profile_report(profile)}\n\ntraces and numbers: {config.profile}"
        return text, {"profile": config.profile, "traces": traces}
    result = run_benchmark(config, command)
    return f"{console_report(result)}\n\nall of it: {config.output}", summary(result)


def console_report(result: BenchmarkResult) -> str:
    """All tables and remarks, in plain text."""
    blocks = [_title(result), _conditions(result), *_tables(result, Table.console), *_remarks(result)]
    return "\n\n".join(blocks)


def markdown_report(result: BenchmarkResult, *, is_brief: bool = False) -> str:
    """The same as a section of a Markdown document; ``is_brief``: the first table and remark alone."""
    hardware = result.hardware
    where = [hardware.gpu] if hardware.gpu else []
    where += [f"{hardware.cpu}, {hardware.num_cores} cores, {hardware.num_threads} threads"]
    versions = result.versions | result.peer_versions
    where += [f"{name} {number}" for name, number in versions.items() if number is not None]
    origin = f"{'; '.join(where)}; {result.date}:\n`{result.command}`"
    shown = slice(1) if is_brief else slice(None)
    blocks = [*list(_tables(result, Table.markdown))[shown], *_remarks(result)[shown]]
    return "\n\n".join([f"**{_title(result)}**", _conditions(result), *blocks, origin])


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


def update_readme(path: Path, results: Sequence[Path], *, is_brief: bool = False) -> None:
    """Replace the text between the markers by one section per result, in the order given.

    Raises :class:`UserError` if a result or the markers cannot be read, and leaves the file unchanged.
    """
    sections = [markdown_report(BenchmarkResult.read(result), is_brief=is_brief) for result in results]
    try:
        # Not read_text: it would turn the line ends that are outside the markers into this system's.
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--update_readme {path} cannot be read: {error}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(
            f"--update_readme {path} must hold {BEGIN} once and {END} once after it: put both where the "
            "tables belong"
        )
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    content = "\n\n".join([BEGIN, *sections, END])
    write_atomically(path, lambda file: file.write(f"{before}{content}{after}".encode()))


def _tables(result: BenchmarkResult, render: Callable[[Table], str]) -> Iterator[str]:
    """The tables that are not empty, each but the first after a heading."""
    first = tables.policies_table if result.is_of_policies else tables.methods_table
    yield render(first(result))
    for heading, table_of in MORE_TABLES:
        table = table_of(result)
        if table.rows:
            yield heading
            yield render(table)


def _title(result: BenchmarkResult) -> str:
    """The models; a synthetic pair is called one."""
    models, record = result.models, result.synthetic
    sizes = f"{_count(models.num_target_parameters)} target, {_count(models.num_draft_parameters)} draft"
    if record is None:
        return f"{models.target} with draft {models.draft} ({sizes}), {models.dtype}"
    agreement = f"epsilon {record.epsilon:.4f}"
    if record.measured_acceptance is not None:
        agreement += f", measured greedy acceptance {record.measured_acceptance:.2f}"
    return f"Synthetic pair {record.shape} of random weights ({sizes}; {agreement}), {models.dtype}"


def _conditions(result: BenchmarkResult) -> str:
    work, settings = result.work, result.settings
    sampling = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    if settings.get("top_k"):
        sampling += f", top_k {settings['top_k']}"
    if settings.get("top_p", 1) < 1:
        sampling += f", top_p {settings['top_p']:g}"
    if settings.get("acceptance_rule") == "gumbel":
        sampling += ", gumbel"
    groups = len(result.methods[0].groups)
    rows = f"{work.num_rows} rows" + (f" in {groups} groups, each timed separately" if groups else "")
    drafts = "" if result.is_of_policies else f"K = {settings['num_draft_tokens']} draft tokens; "
    return (
        f"{rows}; prompts of {work.shortest_prompt} to {work.longest_prompt} tokens, "
        f"completions of at most {work.shortest_limit} to {work.longest_limit}; {sampling}; "
        f"{drafts}repeats, taken in turn: {len(result.methods[0].seconds)}"
    )


def _remarks(result: BenchmarkResult) -> list[str]:
    has_transformers = any(method.ratio_to_generate is not None for method in result.methods)
    reference = "transformers' generate" if has_transformers else "the target alone"
    differs = bool(result.most_rows_differing) and result.models.dtype == "float32"
    is_apart = any(method.overlap is not None for method in result.methods)
    has_more = tables.num_devices(result, SEPARATE) > 1
    remarks = (
        (POLICIES_REMARK, result.is_of_policies),
        (TRANSFORMERS_REMARK, has_transformers),
        (PEERS_REMARK, bool(result.peer_versions)),
        (SPREADS_REMARK, bool(result.spreads)),
        (OVERHEAD_REMARK, bool(result.policy_overhead)),
        (OVERLAP_REMARK, is_apart),
        (PER_DEVICE_REMARK if has_more else SHARED_THREADS_REMARK, is_apart),
        (f"Rows differ from {reference} in float32: near-ties may, anything else is a bug.", differs),
        ("The pair is synthetic: random weights, whose text means nothing.", result.synthetic is not None),
    )
    return [remark for remark, applies in remarks if applies]


def _count(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"
