"""Grade-school mathematics: is the final number correct?

``strict_match`` is the data set's own rule (Cobbe et al. 2021, grade_school_math/dataset.py): the number
after the first "#### ", without commas, compared as text. ``exact_match`` compares values, so that 5, 5.0 and
$5 are the same, and takes the number that a completion gives as its answer, in the forms of
lm-evaluation-harness's tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from specdist.results.evaluate.config import GSM8K, EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Scores
from specdist.results.evaluate.tasks.texts import RowScore, readings, reference_column, score_texts

MARKED = re.compile(r"#### (-?[0-9.,]+)")

# Thousands are grouped by commas or by (narrow, fixed) spaces.
SPACES = " \u00a0\u2009\u202f"
WHOLE = rf"(?:\d{{1,3}}(?:,\d{{2,3}})*,\d{{3}}|\d{{1,3}}(?:[{SPACES}]\d{{3}})+|\d+)(?!\d)"
DIGITS = rf"(?:{WHOLE}(?:\.\d+(?!\d)|(?!\.\d))|\.\d+)"
# A minus directly after a word or a number is a dash, as in 3-4.
NUMBER = rf"(?:(?<![\w.)\]}}%])-)?(?:[$€£]-?)?{DIGITS}"
# What is calculated before the result is shown, with a unit or two: "9 eggs * $2 = ".
GAP = r"[()\s]{0,6}"
OPERAND = rf"{GAP}{NUMBER}(?: [a-z]+){{0,2}}{GAP}"
CALCULATION = rf"(?:{OPERAND}(?:(?:[-+*/×÷x]|\\times|\\cdot|\\div){OPERAND})+=\s*)*"
RESULT = rf"{CALCULATION}{GAP}(?P<number>{NUMBER})"
MARKUP = r"[\s*_`~$\\(\[{]{0,12}"
SAID = (
    r"(?i:\banswer\b(?:[*_ \t]{0,6}\n|[^\n\d.:=]{0,60}?(?:\bis\b|[:=])))(?!\s*not\b)"
    rf"{MARKUP}(?:[A-Za-z]{{1,20}} ){{0,4}}{MARKUP}"
)
# How an answer is given, the surest first. A mark is also Markdown's heading of the fourth level: neither
# "#### Step 1" nor "#### 1. The eggs" nor "#### 2 Calculations" is an answer.
FORMS = tuple(
    re.compile(form)
    for form in (
        rf"####{MARKUP}(?:{SAID})?{RESULT}(?![.):]+[*_]*[ \t]+\S|[ \t]*[A-Z][a-z])",
        rf"\\boxed\s*\{{[^{{}}\d]{{0,20}}?{RESULT}",
        rf"{SAID}{RESULT}",
    )
)
ANY_NUMBER = re.compile(rf"(?P<number>{NUMBER})")


def score_gsm8k(completions: Completions, config: EvaluateConfig) -> Scores:
    column = gsm8k_column(completions, config)
    return score_texts(completions, column, score_answer, cut_at=config.cut_at)


def gsm8k_column(completions: Completions, config: EvaluateConfig) -> str:
    """The column of correct answers. Raises :class:`UserError` if there is none."""
    return reference_column(completions, config.reference_column, GSM8K, "final_answer")


def score_answer(answer: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
    number, marked = final_number(answer), marked_text(answer)
    rights = [final_number(reference) for reference in references]
    texts = [marked_text(reference) or reference.strip().replace(",", "") for reference in references]
    return (
        {
            "exact_match": float(number is not None and number in rights),
            "strict_match": float(marked is not None and marked in texts),
        },
        {"answer": None if number is None else f"{number:f}"},
    )


def marked_text(text: str) -> str | None:
    """The answer by the data set's own rule."""
    match = MARKED.search(text)
    return match[1].strip().replace(",", "") if match else None


def final_number(text: str) -> Decimal | None:
    """The last number that is given as the answer in the surest form; without such forms the last number.

    Text after the next question that the model asks itself counts only if there is no number before it.
    """
    for reading in readings(plain(text)):
        for form in (*FORMS, ANY_NUMBER):
            numbers = [match["number"] for match in form.finditer(reading)]
            if numbers:
                return Decimal(re.sub(rf"[$€£,{SPACES}]", "", numbers[-1]))
    return None


def plain(text: str) -> str:
    """Without the minus sign of typography, and what LaTeX puts between digits and before a dollar."""
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,!;: ])(?=\d{3})", ",", text.replace("\u2212", "-"))
    return text.replace("\\$", "$")
