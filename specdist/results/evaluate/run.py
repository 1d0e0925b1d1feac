"""The evaluation job: a task's scores of one run or two, compared, printed and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specdist.data.store.copies import mirrored
from specdist.job.totals.report import cut_line, is_often_cut, loop_line
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
from specdist.results.evaluate.harness import export_prompts, harness
from specdist.results.evaluate.identity import compare_tokens
from specdist.results.evaluate.reading import Completions, read_completions
from specdist.results.evaluate.results import (
    DIFFERENCES_FILE,
    ROWS_FILE,
    check_output,
    identity_text,
    metrics_table,
    paired_table,
    write_results,
)
from specdist.results.evaluate.scores import ERROR, Scores, Scoring, bootstrap_interval, compare_paired
from specdist.results.evaluate.tasks.gsm8k import gsm8k
from specdist.results.evaluate.tasks.humaneval import humaneval
from specdist.results.evaluate.tasks.matching import exact_match, math, plugin, rouge
from specdist.results.evaluate.tasks.multiple_choice import multiple_choice
from specdist.utils.errors import UserError

FUNCTIONS: dict[str, Callable[[Completions, EvaluateConfig], Scoring]] = {
    GSM8K: gsm8k, MATH: math, HUMANEVAL: humaneval, ROUGE: rouge, EXACT_MATCH: exact_match,
    MULTIPLE_CHOICE: multiple_choice, LM_EVAL: harness, PLUGIN: plugin,
}  # fmt: skip


def run_evaluation(config: EvaluateConfig) -> tuple[str, dict[str, Any]]:
    """The text to print and the document of results. Raises :class:`UserError`."""
    if config.lm_eval_export is not None:
        return export_prompts(config)
    assert config.run is not None
    output = config.output_folder
    check_output(output, overwrite=config.overwrite)
    runs = [read_completions(mirrored(name)) for name in (config.run, config.against) if name is not None]
    scorings = [FUNCTIONS[config.task_kind](run, config) for run in runs] if config.task_kind else []
    described = [_describe(config, run) for run in runs]
    document, parts = described[0], list(map(_text_of, runs, described))
    tables: dict[str, Mapping[str, Any]] = {}
    if len(runs) > 1:
        identity, tables[DIFFERENCES_FILE] = compare_tokens(*runs)
        parts.append(identity_text(identity))
        document |= {"against": config.against, "identity": identity}
    if scorings:
        scores, *others = (scoring() for scoring in scorings)
        if scores.columns:
            tables[ROWS_FILE] = scores.columns
        metrics = {
            name: {
                "value": metric.value,
                "interval": bootstrap_interval(metric.values_P),
                "num_prompts": len(metric.values_P),
            }
            for name, metric in scores.metrics.items()
        }
        compared = _compare(scores, others[0], config) if others else {}
        document |= {"metrics": metrics, "facts": dict(scores.facts), "paired": compared}
        parts += [metrics_table(metrics), *([paired_table(compared)] if compared else [])]
        parts += _texts_of_facts(scores.facts)
    write_results(output, document, tables)
    parts.append(f"results: {output}")
    return "\n\n".join(parts), document | {"output": str(output)}


def _describe(config: EvaluateConfig, completions: Completions) -> dict[str, Any]:
    rows = completions.table
    errors = Counter(
        str(row["error"])
        for row in completions.rows("finish_reason", "error")
        if row["finish_reason"] == ERROR
    )
    return {
        "run": config.run,
        "task": config.task,
        "exact": completions.is_exact,
        "complete": completions.num_missing_shards == 0,
        "num_rows": rows.num_rows,
        "num_prompts": len(np.unique(rows["row_id"].to_numpy())),
        "num_error_rows": sum(errors.values()),
        "errors": dict(errors.most_common()),
        "num_cut_completions": rows["finish_reason"].to_pylist().count("length"),
        "num_looping_completions": rows["finish_reason"].to_pylist().count("repetition"),
        "options": config.task_options,
    }


def _text_of(completions: Completions, found: Mapping[str, Any]) -> str:
    """What is evaluated, as it was described, and what a reader must know about it, such as rows with
    errors."""
    num_rows, num_errors, num_cut = (
        found[f"num_{name}"] for name in ("rows", "error_rows", "cut_completions")
    )
    lines = [f"{completions.path}: {num_rows:,} completions of {found['num_prompts']:,} prompts"]
    if num_errors:
        shown = "; ".join(f"{count:,} x {reason}" for reason, count in [*found["errors"].items()][:3])
        lines.append(f"{num_errors:,} rows ended with an error and count as incorrect: {shown}")
    if num_cut:
        settings = {} if completions.manifest is None else completions.manifest.fingerprint
        warning = "WARNING: " if is_often_cut(num_cut, num_rows - num_errors) else ""
        lines.append(warning + cut_line(num_cut, num_rows - num_errors, settings))
    if found["num_looping_completions"]:
        lines.append(loop_line(found["num_looping_completions"], num_rows - num_errors))
    if completions.num_missing_shards:
        lines.append(f"NOT complete: {completions.num_missing_shards:,} shards are still missing")
    if completions.is_exact is False:
        lines.append("NOT exact: a lossy run, whose tokens do not follow the target's distribution")
    return "\n".join(lines)


def _compare(scores: Scores, other: Scores, config: EvaluateConfig) -> dict[str, dict[str, Any]]:
    """Compare the prompts of both runs. Raises :class:`UserError` if no prompt was scored in both."""
    found = {}
    for name, metric in scores.metrics.items():
        if name in other.metrics:
            compared = compare_paired(metric, other.metrics[name])
            if compared is None:
                raise UserError(f"--against {config.against}: no prompt was scored in both runs")
            found[name] = compared
    return found


def _texts_of_facts(facts: Mapping[str, Any]) -> list[str]:
    lines = []
    if facts.get("num_rows_without_reference"):
        lines.append(f"{facts['num_rows_without_reference']:,} rows have no reference and are left out")
    if facts.get("num_only_thinking"):
        lines.append(f"{facts['num_only_thinking']:,} completions are thinking without an answer after it")
    if "outcomes" in facts:
        ended = ", ".join(f"{count:,} {name}" for name, count in facts["outcomes"].items())
        lines.append(f"programs: {ended}")
    for task, figures in facts.get("lm_eval", {}).items():
        shown = ", ".join(f"{name} {value:g}" for name, value in figures.items())
        lines.append(f"the harness on {task}: {shown}")
    return ["\n".join(lines)] if lines else []
