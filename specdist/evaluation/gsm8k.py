"""Grade-school mathematics: is the final number correct?

``strict_match`` is the data set's own rule (Cobbe et al. 2021, grade_school_math/dataset.py): the number
after the first "#### ", without commas, compared as text. ``exact_match`` compares values, so that 5, 5.0 and
$5 are the same, and takes the last number of a completion without the mark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from specdist.evaluation.config import GSM8K, EvaluateConfig
from specdist.evaluation.reading import Completions
from specdist.evaluation.scores import Scores
from specdist.evaluation.text_tasks import RowScore, reference_column, score_texts

MARKED = re.compile(r"#### (-?[0-9.,]+)")
MARK = re.compile(r"####\s*([^\n]*)")
NUMBER = re.compile(r"-?\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def score_gsm8k(completions: Completions, config: EvaluateConfig) -> Scores:
    column = gsm8k_column(completions, config)
    return score_texts(completions, column, score_answer, cut_at=config.cut_at)


def gsm8k_column(completions: Completions, config: EvaluateConfig) -> str:
    """The column of correct answers. Raises :class:`UserError` if there is none."""
    return reference_column(completions, config.reference_column, GSM8K, "final_answer")


def score_answer(completion: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
    answer, marked = final_number(completion), marked_text(completion)
    rights = [final_number(reference) for reference in references]
    texts = [marked_text(reference) or reference.strip().replace(",", "") for reference in references]
    return (
        {
            "exact_match": float(answer is not None and answer in rights),
            "strict_match": float(marked is not None and marked in texts),
        },
        {"answer": None if answer is None else f"{answer:f}"},
    )


def marked_text(text: str) -> str | None:
    """The answer by the data set's own rule."""
    match = MARKED.search(text)
    return match[1].strip().replace(",", "") if match else None


def final_number(text: str) -> Decimal | None:
    """The first number after the first ####; without this mark the last number of the text."""
    mark = MARK.search(text)
    found = NUMBER.findall(mark[1] if mark else text)
    numbers = found[:1] if mark else found[-1:]
    try:
        return Decimal(numbers[0].replace(",", "").replace("$", "")) if numbers else None
    except InvalidOperation:
        return None
