"""Answers compared with their references: word for word, and by packages: mathematics and ROUGE. And a user's
function as a task: ``--task module:function``."""

from __future__ import annotations

import importlib
import math as arithmetic
import string
import sys
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from specdist.results.evaluate.config import EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import ERROR, Metric, Scores, Scoring, identity_columns
from specdist.results.evaluate.tasks.texts import RowScore, as_references, cut, reference_column, score_texts
from specdist.utils.errors import UserError

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(completions: Completions, config: EvaluateConfig) -> Scoring:
    """Whether the answer is a reference: white space never counts, case and punctuation unless they are
    ignored."""

    def normalized(text: str) -> str:
        text = text.casefold() if config.ignore_case else text
        text = text.translate(WITHOUT_PUNCTUATION) if config.ignore_punctuation else text
        return " ".join(text.split())

    def score(answer: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
        return {"exact_match": float(normalized(answer) in map(normalized, references))}, {}

    return partial(score_texts, completions, config, reference_column(completions, config), score)


def math(completions: Completions, config: EvaluateConfig) -> Scoring:
    """Whether math-verify finds the answer equal to a reference; what takes it more than 5 seconds is not.

    Raises :class:`UserError` for a missing column or package, and for a reference without an expression.
    """
    package, column = _package("math_verify", "math-verify", config), reference_column(completions, config)
    expressions: dict[str, Any] = {}
    for text in {text for value in completions.table[column].to_pylist() for text in as_references(value)}:
        # An expression alone is not marked as LaTeX.
        marked = text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"
        expressions[text] = package.parse(marked)
        if not expressions[text]:
            raise UserError(f"--task math: math-verify finds no expression in the reference {text!r}")

    def score(answer: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
        given = package.parse(answer)
        is_right = any(package.verify(expressions[reference], given) for reference in references)
        return {"accuracy": float(is_right)}, {"answer": str(given[-1]) if given else None}

    return partial(score_texts, completions, config, column, score)


def rouge(completions: Completions, config: EvaluateConfig) -> Scoring:
    """ROUGE-1, -2 and -L (Lin 2004) by the `rouge-score` package: F-measure, the best over all references.
    Raises :class:`UserError` for a missing column or package."""
    package = _package("rouge_score.rouge_scorer", "rouge-score", config)
    scorer = package.RougeScorer(list(ROUGE_TYPES), use_stemmer=config.use_stemmer)

    def score(answer: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
        found = scorer.score_multi(references, answer)
        return {name: float(found[name].fmeasure) for name in ROUGE_TYPES}, {}

    return partial(score_texts, completions, config, reference_column(completions, config), score)


def _package(module: str, name: str, config: EvaluateConfig) -> Any:
    """A package of the extra ``evaluate``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"--task {config.task} needs the package {name}: pip install -e '.[evaluate]' in specdist's "
            f"folder ({error})"
        ) from error


def load_function(name: str) -> Callable[[dict[str, Any]], Any]:
    """Import ``module:function``, also from the working folder. Raises :class:`UserError`."""
    module_name, function_name = name.split(":")
    # Python searches the folder of the script, not the working folder.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--task {name} cannot be loaded: {error}") from error
    if not callable(function):
        raise UserError(f"--task {name} is not a function")
    return function


def plugin(completions: Completions, config: EvaluateConfig) -> Scoring:
    """Raises :class:`UserError` if the function cannot be loaded."""
    assert config.task is not None
    return partial(_score_by, completions, config, load_function(config.task))


def _score_by(
    completions: Completions, config: EvaluateConfig, function: Callable[[dict[str, Any]], Any]
) -> Scores:
    """Call the function with each row, a dictionary of all columns; it returns a number, or numbers by name.

    Rows that ended with an error get 0 without a call. Raises :class:`UserError` if the function raises, or
    returns a number that is not finite or names that differ between rows.
    """
    assert config.task is not None
    rows = completions.rows()
    found: list[dict[str, float] | None] = []
    for row in rows:
        if row["finish_reason"] == ERROR:
            found.append(None)
            continue
        text = cut(row["completion"], config.cut_at)
        found.append(_call(config.task, function, {**row, "completion": text}))
    names = next((set(scores) for scores in found if scores is not None), set())
    for row, scores in zip(rows, found, strict=True):
        if scores is not None and set(scores) != names:
            raise UserError(
                f"--task {config.task}: row {row['row_id']} has the scores {sorted(scores)}, others have "
                f"{sorted(names)}; all rows need the same names"
            )
    numbers = {name: [0.0 if each is None else each[name] for each in found] for name in sorted(names)}
    row_ids = [row["row_id"] for row in rows]
    return Scores(
        columns={**numbers, **identity_columns(rows)},
        metrics={name: Metric.of(row_ids, values) for name, values in numbers.items()},
    )


def _call(task: str, function: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> dict[str, float]:
    where = f"--task {task}: row {row['row_id']}, sample {row['sample_index']}"
    try:
        answer = function(row)
    except Exception as error:  # a user's function can raise anything
        raise UserError(f"{where}: the function raised {error!r}") from error
    scores = answer if isinstance(answer, dict) else {"score": answer}
    for name, value in scores.items():
        if not isinstance(value, Real) or not arithmetic.isfinite(value):
            raise UserError(f"{where}: {name} is {value!r}, but must be a finite number")
    return {str(name): float(value) for name, value in scores.items()}
