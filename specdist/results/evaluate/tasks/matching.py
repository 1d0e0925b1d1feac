"""Completions compared with references: word for word, or by ROUGE."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from specdist.results.evaluate.config import EXACT_MATCH, ROUGE, EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Scores
from specdist.results.evaluate.tasks.text_tasks import RowScore, reference_column, score_texts
from specdist.utils.errors import UserError

WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


def score_exact_match(completions: Completions, config: EvaluateConfig) -> Scores:
    def score(completion: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
        answer = normalized(completion, config)
        return {"exact_match": float(answer in [normalized(each, config) for each in references])}, {}

    return score_texts(completions, exact_match_column(completions, config), score, cut_at=config.cut_at)


def exact_match_column(completions: Completions, config: EvaluateConfig) -> str:
    """The column of correct answers. Raises :class:`UserError` if there is none."""
    return reference_column(completions, config.reference_column, EXACT_MATCH)


def normalized(text: str, config: EvaluateConfig) -> str:
    """The text that is compared: white space never counts, case and punctuation unless they are ignored."""
    if config.ignore_case:
        text = text.casefold()
    if config.ignore_punctuation:
        text = text.translate(WITHOUT_PUNCTUATION)
    return " ".join(text.split())


def score_rouge(completions: Completions, config: EvaluateConfig) -> Scores:
    """ROUGE-1, -2 and -L (Lin 2004) by the `rouge-score` package: F-measure, the best over all references."""
    scorer = _scorer_class()(list(ROUGE_TYPES), use_stemmer=config.use_stemmer)

    def score(completion: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
        found = scorer.score_multi(references, completion)
        return {name: float(found[name].fmeasure) for name in ROUGE_TYPES}, {}

    return score_texts(completions, check_rouge(completions, config), score, cut_at=config.cut_at)


def check_rouge(completions: Completions, config: EvaluateConfig) -> str:
    """The column of references. Raises :class:`UserError` if it or the package is missing."""
    _scorer_class()
    return reference_column(completions, config.reference_column, ROUGE)


def _scorer_class() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer  # an extra of the project
    except ImportError as error:
        raise UserError(
            "--task rouge needs the package rouge-score: pip install -e '.[evaluate]' in specdist's folder"
        ) from error
    return RougeScorer
