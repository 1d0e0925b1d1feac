"""The evaluation job: a task's scores of one run or two, compared, printed and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specdist.data.store.copies import mirrored
from specdist.job.totals.report import cut_line, is_often_cut
from specdist.results.evaluate.config import (
    EXACT_MATCH,
    GSM8K,
    HUMANEVAL,
    LM_EVAL,
    MATH,
    MULTIPLE_CHOICE,
    PLUGIN,
    ROUGE,
    EvaluateConfig,
)
from specdist.results.evaluate.harness import check_harness, export_prompts, score_harness
from specdist.results.evaluate.identity import compare_tokens
from specdist.results.evaluate.intervals import bootstrap_interval, compare_paired
from specdist.results.evaluate.plugin import load_function, score_plugin
from specdist.results.evaluate.reading import Completions, read_completions
from specdist.results.evaluate.results import (
    DIFFERENCES_FILE,
    ROWS_FILE,
    check_output,
    identity_lines,
    metrics_table,
    paired_table,
    write_results,
)
from specdist.results.evaluate.scores import Scores
from specdist.results.evaluate.tasks.gsm8k import gsm8k_column, score_gsm8k
from specdist.results.evaluate.tasks.humaneval import check_humaneval, score_humaneval
from specdist.results.evaluate.tasks.multiple_choice import check_multiple_choice, score_multiple_choice
from specdist.results.evaluate.tasks.packaged import check_math, check_rouge, score_math, score_rouge
from specdist.results.evaluate.tasks.texts import ERROR, exact_match_column, score_exact_match
from specdist.utils.errors import UserError

# What scores a run by task, and what checks columns, packages and functions before anything is scored.
FUNCTIONS: dict[str, tuple[Callable[[Completions, EvaluateConfig], Scores], Callable[..., object]]] = {
    GSM8K: (score_gsm8k, gsm8k_column),
    MATH: (score_math, check_math),
    HUMANEVAL: (score_humaneval, check_humaneval),
    ROUGE: (score_rouge, check_rouge),
    EXACT_MATCH: (score_exact_match, exact_match_column),
    MULTIPLE_CHOICE: (score_multiple_choice, check_multiple_choice),
    LM_EVAL: (score_harness, check_harness),
    PLUGIN: (score_plugin, lambda _, config: load_function(config.task)),
}


def run_evaluation(config: EvaluateConfig) -> tuple[str, dict[str, Any]]:
    """The text to print and the document of results. Raises :class:`UserError`."""
    if config.lm_eval_export is not None:
        return export_prompts(config)
    assert config.run is not None
    output = config.output_folder
    check_output(output, overwrite=config.overwrite)
    first = read_completions(mirrored(config.run))
    second = None if config.against is None else read_completions(mirrored(config.against))
    runs = [first] if second is None else [first, second]
    score = None
    if config.task_kind is not None:
        score, check = FUNCTIONS[config.task_kind]
        for run in runs:
            check(run, config)
    parts, document = [_describe(run) for run in runs], _document(config, first)
    tables: dict[str, Mapping[str, Any]] = {}
    if second is not None:
        identity, tables[DIFFERENCES_FILE] = compare_tokens(first, second)
        parts.append("\n".join(identity_lines(identity)))
        document |= {"against": config.against, "identity": identity}
    if score is not None:
        scores = score(first, config)
        tables[ROWS_FILE] = scores.columns
        metrics = _figures(scores, config)
        compared = {} if second is None else _compare(scores, score(second, config), config)
        document |= {"metrics": metrics, "facts": dict(scores.facts), "paired": compared}
        parts.append(metrics_table(metrics, config.confidence))
        if compared:
            parts.append(paired_table(compared, config.confidence))
        parts += _fact_lines(scores.facts)
    write_results(output, document, tables)
    document["output"] = str(output)
    parts.append(f"results: {output}")
    return "\n\n".join(parts), document


def _describe(completions: Completions) -> str:
    """What is evaluated, and what a reader must know about it, such as rows with errors."""
    errors = _errors(completions)
    num_rows = completions.table.num_rows
    lines = [f"{completions.path}: {num_rows:,} completions of {_num_prompts(completions):,} prompts"]
    if errors:
        shown = "; ".join(f"{count:,} x {reason}" for reason, count in errors.most_common(3))
        lines.append(f"{sum(errors.values()):,} rows ended with an error and count as incorrect: {shown}")
    num_cut, num_completions = _num_cut(completions), num_rows - sum(errors.values())
    if num_cut:
        settings = {} if completions.manifest is None else completions.manifest.fingerprint
        warning = "WARNING: " if is_often_cut(num_cut, num_completions) else ""
        lines.append(warning + cut_line(num_cut, num_completions, settings))
    if completions.num_missing_shards:
        lines.append(f"NOT complete: {completions.num_missing_shards:,} shards are still missing")
    if completions.is_exact is False:
        lines.append("NOT exact: a lossy run, whose tokens do not follow the target's distribution")
    return "\n".join(lines)


def _document(config: EvaluateConfig, completions: Completions) -> dict[str, Any]:
    errors = _errors(completions)
    return {
        "run": config.run,
        "task": config.task,
        "exact": completions.is_exact,
        "complete": completions.num_missing_shards == 0,
        "num_rows": completions.table.num_rows,
        "num_prompts": _num_prompts(completions),
        "num_error_rows": sum(errors.values()),
        "errors": dict(errors.most_common()),
        "num_cut_completions": _num_cut(completions),
        "confidence": config.confidence,
        "options": config.task_options,
    }


def _errors(completions: Completions) -> Counter[str]:
    """Number of rows with an error, by reason."""
    rows = completions.rows("finish_reason", "error")
    return Counter(str(row["error"]) for row in rows if row["finish_reason"] == ERROR)


def _num_cut(completions: Completions) -> int:
    """Number of completions cut by a length limit, which may miss their answer."""
    return completions.table["finish_reason"].to_pylist().count("length")


def _num_prompts(completions: Completions) -> int:
    return len(np.unique(completions.table["row_id"].to_numpy()))


def _figures(scores: Scores, config: EvaluateConfig) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "value": metric.value,
            "interval": bootstrap_interval(metric.values_P, config.confidence),
            "num_prompts": len(metric.values_P),
        }
        for name, metric in scores.metrics.items()
    }


def _compare(scores: Scores, other: Scores, config: EvaluateConfig) -> dict[str, dict[str, Any]]:
    """Compare the prompts of both runs. Raises :class:`UserError` if no prompt was scored in both."""
    found = {}
    for name in scores.metrics.keys() & other.metrics.keys():
        compared = compare_paired(scores.metrics[name], other.metrics[name], config.confidence)
        if compared is None:
            raise UserError(f"--against {config.against}: no prompt was scored in both runs")
        found[name] = compared
    return {name: found[name] for name in scores.metrics if name in found}


def _fact_lines(facts: Mapping[str, Any]) -> list[str]:
    lines = []
    if facts.get("num_rows_without_reference"):
        lines.append(f"{facts['num_rows_without_reference']:,} rows have no reference and are left out")
    if facts.get("num_only_thinking"):
        lines.append(f"{facts['num_only_thinking']:,} completions are thinking without an answer after it")
    if "outcomes" in facts:
        lines.append(
            "programs: " + ", ".join(f"{count:,} {name}" for name, count in facts["outcomes"].items())
        )
        lines.append(f"problems: the column {facts['problem_column']}")
    for task, figures in facts.get("lm_eval", {}).items():
        shown = ", ".join(f"{name} {value:g}" for name, value in figures.items())
        lines.append(f"the harness on {task}: {shown}")
    return ["\n".join(lines)] if lines else []
