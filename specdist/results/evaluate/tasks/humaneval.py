"""HumanEval (Chen et al. 2021): does the completed function pass its tests?

The program of an answer is the problem's code, the answer's, and the test, in one text.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from specdist.results.evaluate.config import EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import (
    ERROR,
    IDENTITY_COLUMNS,
    Metric,
    Scores,
    Scoring,
    identity_columns,
)
from specdist.results.evaluate.tasks.sandbox import PASSED, check_sandbox, run_programs
from specdist.results.evaluate.tasks.texts import answer_columns, answer_of, num_only_thinking
from specdist.utils.errors import UserError

NOT_RUN = "not run"


def humaneval(completions: Completions, config: EvaluateConfig) -> Scoring:
    """Run every completion as a program. Raises :class:`UserError` for missing columns, for k above the
    number of samples, and if no program can be run."""
    completions.check_columns(dict.fromkeys(("test", "entry_point"), f"--task {config.task}"))
    # The number of samples of every prompt.
    counts_P = np.unique(completions.table["row_id"].to_numpy(), return_counts=True)[1]
    tries = _tries(config.k, counts_P)
    check_sandbox()
    return partial(_score, completions, config, counts_P, tries)


def _score(
    completions: Completions, config: EvaluateConfig, counts_P: np.ndarray, tries: Sequence[int]
) -> Scores:
    settings = {} if completions.manifest is None else completions.manifest.fingerprint
    is_chat = (settings.get("messages_column") or "messages") in completions.table.column_names
    names = [*IDENTITY_COLUMNS, *answer_columns(completions), "test", "entry_point"]
    rows = completions.rows(*dict.fromkeys(names))
    answered = [row for row in rows if row["finish_reason"] != ERROR]
    programs = []
    for row in answered:
        # The prompt of a chat has words and a template's markers around the problem.
        prompt = row["prompt"] or ""
        problem = problem_code(prompt, row["entry_point"]) if is_chat else prompt
        programs.append(program_of(problem, answer_of(row, config.cut_at), row))
    outcomes = iter(run_programs(programs))
    found = [None if row["finish_reason"] == ERROR else next(outcomes) for row in rows]
    ended = [NOT_RUN if each is None else each.outcome for each in found]
    passed = [float(name == PASSED) for name in ended]
    rates = Metric.of([row["row_id"] for row in rows], passed)
    passed_P = np.rint(rates.values_P * counts_P).astype(np.int64)
    return Scores(
        columns={
            **identity_columns(rows),
            "outcome": ended,
            "detail": [None if each is None else each.detail for each in found],
            "passed": passed,
        },
        metrics={f"pass@{k}": Metric(rates.prompt_ids_P, pass_at_k(counts_P, passed_P, k)) for k in tries},
        facts={"num_only_thinking": num_only_thinking(answered), "outcomes": dict(Counter(ended))},
    )


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


FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
INDENTED = re.compile(r"(?:\s*\n)?(?: {2}|\t)\s*\S")
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
# What a problem consists of; a line of prose may parse as an expression.
PARTS = (
    ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign
)  # fmt: skip


def program_of(problem: str, answer: str, row: Mapping[str, Any]) -> str:
    """``row``: with ``entry_point``, the function's name, and ``test``.

    A fenced block with the whole function runs after the problem's code, since the problem's imports and
    helpers belong to it; the function itself is defined anew. Any other answer goes on where the problem
    ends, as in the reference implementation.
    """
    name = row["entry_point"]
    blocks = [textwrap.dedent(block) for block in FENCED.findall(answer)]
    block = next((block for block in blocks if _place(name, block) is not None), None)
    if block is None:
        program = problem + body_of(answer)
    else:
        program = "\n".join(part for part in (problem_code(problem, name), block) if part)
        # These must come first.
        future = [line.rstrip("\n") + "\n" for line in FUTURE.findall(program)]
        program = "".join(future) + FUTURE.sub("", program)
    return f"{program}\n{row['test']}\ncheck({name})"


def body_of(answer: str) -> str:
    """What continues a problem: indented lines, up to the end of a fence that the prompt has begun or in a
    fence of their own; else all of the answer."""
    bodies = [answer.partition("```")[0], *FENCED.findall(answer)]
    return next((body for body in bodies if INDENTED.match(body)), answer)


@lru_cache(maxsize=1024)
def problem_code(text: str, name: str) -> str:
    """The code around the function ``name`` in a problem's text, which may have prose or a chat template's
    markers about it; empty without such a function. A function without a body gets one."""
    lines = text.splitlines()
    place = _place(name, text)
    if place is None:
        return ""
    first = text.count("\n", 0, place)
    for end in range(len(lines), first, -1):
        for body in ("", "\n    pass"):
            if _is_code("\n".join(lines[first:end]) + body):
                starts = (start for start in range(first + 1) if _is_code("\n".join(lines[start:end]) + body))
                return "\n".join(lines[next(starts) : end]) + body + "\n"
    return ""


def _place(name: str, text: str) -> int | None:
    """Where the last function of this name begins that is defined at the beginning of a line."""
    found = re.finditer(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", text, re.MULTILINE)
    return max((match.start() for match in found), default=None)


def _is_code(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in docstrings
            return all(isinstance(part, PARTS) for part in ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
