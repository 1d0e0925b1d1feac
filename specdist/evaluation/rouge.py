"""ROUGE-1, -2 and -L (Lin 2004) by the `rouge-score` package: F-measure, of several references the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdist.evaluation.config import ROUGE, EvaluateConfig
from specdist.evaluation.reading import Completions
from specdist.evaluation.scores import Scores
from specdist.evaluation.text_tasks import RowScore, reference_column, score_texts
from specdist.utils.errors import UserError

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


def score_rouge(completions: Completions, config: EvaluateConfig) -> Scores:
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
