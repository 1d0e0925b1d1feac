"""Which function scores which task."""

from __future__ import annotations

from collections.abc import Callable

from specdist.evaluation.config import (
    EXACT_MATCH,
    GSM8K,
    HUMANEVAL,
    LIKELIHOOD,
    LM_EVAL,
    MULTIPLE_CHOICE,
    PLUGIN,
    ROUGE,
    EvaluateConfig,
)
from specdist.evaluation.gsm8k import gsm8k_column, score_gsm8k
from specdist.evaluation.harness import check_harness, score_harness
from specdist.evaluation.humaneval import check_humaneval, score_humaneval
from specdist.evaluation.matching import (
    check_multiple_choice,
    exact_match_column,
    score_exact_match,
    score_multiple_choice,
)
from specdist.evaluation.plugin import load_function, score_plugin
from specdist.evaluation.reading import Completions
from specdist.evaluation.rouge import check_rouge, score_rouge
from specdist.evaluation.scores import Scores

Scorer = Callable[[Completions, EvaluateConfig], Scores]
Check = Callable[[Completions, EvaluateConfig], object]


def _score_likelihood(completions: Completions, config: EvaluateConfig) -> Scores:
    from specdist.evaluation.likelihood import score_likelihood  # torch, which no other task needs

    return score_likelihood(completions, config)


SCORERS: dict[str, Scorer] = {
    GSM8K: score_gsm8k,
    HUMANEVAL: score_humaneval,
    ROUGE: score_rouge,
    EXACT_MATCH: score_exact_match,
    MULTIPLE_CHOICE: score_multiple_choice,
    LIKELIHOOD: _score_likelihood,
    LM_EVAL: score_harness,
    PLUGIN: score_plugin,
}
# What is looked at before anything runs: columns, packages, functions.
CHECKS: dict[str, Check] = {
    GSM8K: gsm8k_column,
    HUMANEVAL: check_humaneval,
    ROUGE: check_rouge,
    EXACT_MATCH: exact_match_column,
    MULTIPLE_CHOICE: check_multiple_choice,
    LM_EVAL: check_harness,
    PLUGIN: lambda completions, config: load_function(config.task or ""),
}


def check_task(completions: Completions, config: EvaluateConfig) -> None:
    """Raises :class:`UserError` for what is missing."""
    assert config.task_kind is not None
    if config.task_kind in CHECKS:
        CHECKS[config.task_kind](completions, config)
