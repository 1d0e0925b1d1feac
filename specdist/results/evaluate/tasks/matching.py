"""Answers compared with their references: word for word, and by packages: mathematics and ROUGE."""

from __future__ import annotations

import importlib
import string
from collections.abc import Mapping
from functools import partial
from typing import Any

from specdist.results.evaluate.config import EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Scoring
from specdist.results.evaluate.tasks.texts import RowScore, as_references, reference_column, score_texts
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
