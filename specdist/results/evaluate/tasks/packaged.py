"""Answers that packages compare with their references: mathematics by math-verify, and texts by ROUGE."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from specdist.results.evaluate.config import MATH, ROUGE, EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Scores
from specdist.results.evaluate.tasks.texts import RowScore, as_references, reference_column, score_texts
from specdist.utils.errors import UserError

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


def check_math(completions: Completions, config: EvaluateConfig) -> dict[str, Any]:
    """What math-verify reads in every reference. Raises :class:`UserError` for a missing column or package,
    and for a reference without an expression."""
    package = _package("math_verify", "math-verify", MATH)
    column, found = reference_column(completions, config.reference_column, MATH), {}
    for text in {text for value in completions.table[column].to_pylist() for text in as_references(value)}:
        # An expression alone is not marked as LaTeX.
        found[text] = package.parse(text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}")
        if not found[text]:
            raise UserError(f"--task {MATH}: math-verify finds no expression in the reference {text!r}")
    return found


def score_math(completions: Completions, config: EvaluateConfig) -> Scores:
    """Whether math-verify finds the answer equal to a reference; what takes it more than 5 seconds is not."""
    expressions, package = check_math(completions, config), _package("math_verify", "math-verify", MATH)

    def score(answer: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
        given = package.parse(answer)
        is_right = any(package.verify(expressions[reference], given) for reference in references)
        return {"accuracy": float(is_right)}, {"answer": str(given[-1]) if given else None}

    column = reference_column(completions, config.reference_column, MATH)
    return score_texts(completions, column, score, cut_at=config.cut_at)


def check_rouge(completions: Completions, config: EvaluateConfig) -> str:
    """The column of references. Raises :class:`UserError` if it or the package is missing."""
    _package("rouge_score.rouge_scorer", "rouge-score", ROUGE)
    return reference_column(completions, config.reference_column, ROUGE)


def score_rouge(completions: Completions, config: EvaluateConfig) -> Scores:
    """ROUGE-1, -2 and -L (Lin 2004) by the `rouge-score` package: F-measure, the best over all references."""
    package = _package("rouge_score.rouge_scorer", "rouge-score", ROUGE)
    scorer = package.RougeScorer(list(ROUGE_TYPES), use_stemmer=config.use_stemmer)

    def score(answer: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
        found = scorer.score_multi(references, answer)
        return {name: float(found[name].fmeasure) for name in ROUGE_TYPES}, {}

    return score_texts(completions, check_rouge(completions, config), score, cut_at=config.cut_at)


def _package(module: str, name: str, task: str) -> Any:
    """A package of the extra ``evaluate``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"--task {task} needs the package {name}: pip install -e '.[evaluate]' in specdist's folder "
            f"({error})"
        ) from error
