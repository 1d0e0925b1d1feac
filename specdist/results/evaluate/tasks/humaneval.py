"""HumanEval (Chen et al. 2021): does the completed function pass its tests?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specdist.results.evaluate.config import HUMANEVAL, EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Groups, Metric, Scores
from specdist.results.evaluate.tasks.answers import answer_columns, answer_of, num_only_thinking
from specdist.results.evaluate.tasks.programs import problem_code, problem_in, program_of
from specdist.results.evaluate.tasks.sandbox import PASSED, Limits, check_sandbox, run_programs
from specdist.results.evaluate.tasks.text_tasks import ERROR, IDENTITY_COLUMNS, identity_columns
from specdist.utils.errors import UserError

NOT_RUN = "not run"


def score_humaneval(completions: Completions, config: EvaluateConfig) -> Scores:
    """Run every completion as a program. Raises :class:`UserError` if no program can be run."""
    source, problem_of = problems_of(completions, config)
    names = [*IDENTITY_COLUMNS, *answer_columns(completions), "test", "entry_point", source]
    rows = completions.rows(*dict.fromkeys(names))
    groups = Groups.of([row["row_id"] for row in rows])
    ks = _tries(config.k, groups.counts_P)
    assert config.time_limit_s is not None and config.memory_limit_mib is not None
    limits = Limits(wall_s=config.time_limit_s, memory_bytes=config.memory_limit_mib * 2**20)
    isolation = check_sandbox(limits)
    is_run = [row["finish_reason"] != ERROR for row in rows]
    programs = [
        program_of(problem_of(row), answer_of(row, config.cut_at), row)
        for row, runs in zip(rows, is_run, strict=True)
        if runs
    ]
    outcomes = iter(run_programs(programs, limits, config.num_workers or os.cpu_count() or 1))
    found = [next(outcomes) if runs else None for runs in is_run]
    passed = [float(each is not None and each.outcome == PASSED) for each in found]
    num_passed_P = groups.sums(passed)
    return Scores(
        columns={
            **identity_columns(rows),
            "outcome": [NOT_RUN if each is None else each.outcome for each in found],
            "detail": [None if each is None else each.detail for each in found],
            "passed": passed,
        },
        metrics={f"pass@{k}": Metric.mean(pass_at_k(groups.counts_P, num_passed_P, k)) for k in ks},
        prompt_ids_P=groups.prompt_ids_P,
        facts={
            "problem_column": source,
            "num_only_thinking": num_only_thinking([row for row in rows if row["finish_reason"] != ERROR]),
            "outcomes": dict(Counter(NOT_RUN if each is None else each.outcome for each in found)),
            "isolation": sorted({part for each in found if each for part in each.isolation} or isolation),
        },
    )


def check_humaneval(completions: Completions, config: EvaluateConfig) -> None:
    """Raises :class:`UserError` for missing columns, and for k above the number of samples."""
    completions.check_columns(dict.fromkeys(("test", "entry_point"), f"--task {HUMANEVAL}"))
    if config.problem_column is not None:
        completions.check_columns({config.problem_column: "--problem_column"})
    _tries(config.k, Groups.of(completions.table["row_id"].to_pylist()).counts_P)


def problems_of(
    completions: Completions, config: EvaluateConfig
) -> tuple[str, Callable[[Mapping[str, Any]], str]]:
    """The column that holds the problems, and what takes one from a row: ``--problem_column``, else a column
    ``problem``, else the message with the function, else the prompt."""
    settings = {} if completions.manifest is None else completions.manifest.fingerprint
    chat = settings.get("messages_column") or "messages"
    wanted = [config.problem_column] if config.problem_column else ["problem", chat]
    source = next((name for name in wanted if name in completions.table.column_names), "prompt")
    if source == "prompt":
        return source, lambda row: row[source] or ""
    if source != chat:
        return source, lambda row: (row[source] or "").rstrip("\n") + "\n"

    def problem_of(row: Mapping[str, Any]) -> str:
        found = problem_in(row[source], row["entry_point"])
        return problem_code(row["prompt"] if found is None else found, row["entry_point"])

    return source, problem_of


def pass_at_k(num_samples_P: np.ndarray, num_passed_P: np.ndarray, k: int) -> np.ndarray:
    """The probability that at least one of k samples of a prompt passes, 1 - C(n - c, k) / C(n, k): equation
    1 of Chen et al. 2021, computed as a product as they do."""
    chances = [
        1.0 if total - passed < k else 1.0 - np.prod(1.0 - k / np.arange(total - passed + 1, total + 1))
        for total, passed in zip(num_samples_P, num_passed_P, strict=True)
    ]
    return np.array(chances, np.float64)


def _tries(wanted: list[int] | None, counts_P: np.ndarray) -> list[int]:
    """The values of k: those wanted, else 1 and the number of samples."""
    num_samples = int(counts_P.min())
    if wanted is None:
        return sorted({1, num_samples})
    if max(wanted) > num_samples:
        raise UserError(
            f"--k {max(wanted)} needs at least as many samples per prompt, and this run has {num_samples}: "
            "generate with a larger --num_samples"
        )
    return sorted(set(wanted))
