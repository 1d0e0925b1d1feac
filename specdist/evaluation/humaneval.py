"""HumanEval (Chen et al. 2021): does the completed function pass its tests?"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdist.evaluation.config import HUMANEVAL, EvaluateConfig
from specdist.evaluation.reading import Completions
from specdist.evaluation.sandbox import PASSED, Limits, check_sandbox, run_programs
from specdist.evaluation.scores import Groups, Metric, Scores
from specdist.evaluation.text_tasks import ERROR, IDENTITY_COLUMNS, cut, identity_columns
from specdist.utils.errors import UserError

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
NOT_RUN = "not run"


def score_humaneval(completions: Completions, config: EvaluateConfig) -> Scores:
    """Run every completion as a program. Raises :class:`UserError` if no program can be run."""
    names = [*IDENTITY_COLUMNS, "prompt", "completion", "test", "entry_point"]
    rows = completions.rows(*names)
    groups = Groups.of([row["row_id"] for row in rows])
    ks = _tries(config.k, groups.counts_P)
    assert config.time_limit_s is not None and config.memory_limit_mib is not None
    limits = Limits(wall_s=config.time_limit_s, memory_bytes=config.memory_limit_mib * 2**20)
    isolation = check_sandbox(limits)
    is_run = [row["finish_reason"] != ERROR for row in rows]
    programs = [
        program_of({**row, "completion": cut(row["completion"], config.cut_at)})
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
            "outcomes": dict(Counter(NOT_RUN if each is None else each.outcome for each in found)),
            "isolation": sorted({part for each in found if each for part in each.isolation} or isolation),
        },
    )


def check_humaneval(completions: Completions, config: EvaluateConfig) -> None:
    """Raises :class:`UserError` for missing columns, and for k above the number of samples."""
    completions.check_columns(dict.fromkeys(("test", "entry_point"), f"--task {HUMANEVAL}"))
    _tries(config.k, Groups.of(completions.table["row_id"].to_pylist()).counts_P)


def pass_at_k(num_samples_P: np.ndarray, num_passed_P: np.ndarray, k: int) -> np.ndarray:
    """The probability that at least one of k samples of a prompt passes, 1 - C(n - c, k) / C(n, k): equation
    1 of Chen et al. 2021, computed as a product as they do."""
    chances = [
        1.0 if total - passed < k else 1.0 - np.prod(1.0 - k / np.arange(total - passed + 1, total + 1))
        for total, passed in zip(num_samples_P, num_passed_P, strict=True)
    ]
    return np.array(chances, np.float64)


def program_of(row: Mapping[str, Any]) -> str:
    """The completed function and its test, joined as in the reference implementation.

    A fenced block with the whole function, as chat models answer, is used without the prompt.
    """
    name, completion = row["entry_point"], row["completion"]
    blocks = [
        block for block in FENCED.findall(completion) if re.search(rf"\bdef {re.escape(name)}\b", block)
    ]
    code = blocks[0] if blocks else row["prompt"] + completion
    return f"{code}\n{row['test']}\ncheck({name})"


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
