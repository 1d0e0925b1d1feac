"""Grade-school mathematics: is the final number correct?

``strict_match`` is the data set's own rule (Cobbe et al. 2021, grade_school_math/dataset.py): the number
after the first "#### ", without commas, compared as text. ``exact_match`` compares values, so that 5, 5.0 and
$5 are the same, and takes the number that a completion gives as its answer, in the forms of
lm-evaluation-harness's tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from specdist.results.evaluate.config import EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Scoring
from specdist.results.evaluate.tasks.texts import RowScore, readings, reference_column, score_texts
from specdist.results.evaluate.tasks.writing import ANSWER, EXPRESSION, IS, SCALE, START, plain, value

MARKED = re.compile(r"#### (-?[0-9.,]+)")
MARKUP = r"[\s*_`~≈#$\\(\[{\"'「]{0,12}?"
SAID = (
    rf"(?i:{ANSWER}(?:[*_ \t]{{0,6}}\n|[^\n\d.:]{{0,60}}?{IS}))"
    rf"{MARKUP}(?:[A-Za-z]{{1,20}} ){{0,4}}?{MARKUP}"
)
# How an answer is given, the surest first: what stands before its number.
MARK = re.compile(rf"####{MARKUP}(?:{SAID})?{START}")
FORMS = (MARK, re.compile(rf"\\boxed\s*\{{[^{{}}\d]{{0,20}}?{START}"), re.compile(SAID + START))
# A mark is also Markdown's heading of the fourth level: neither "#### Step 1" nor "#### 1. The eggs" nor
# "#### 2 Calculations" is an answer.
HEADING = re.compile(r"[.):]+[*_]*[ \t]+\S|[ \t]*[A-Z][a-z]")
ORDINAL = re.compile(r"(?:st|nd|rd|th)\b")


def gsm8k(completions: Completions, config: EvaluateConfig) -> Scoring:
    """Raises :class:`UserError` if there is no column of correct answers."""
    column = reference_column(completions, config, "final_answer")
    return partial(score_texts, completions, config, column, score_answer)


def score_answer(answer: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
    given, marked = final_expression(without_asked_unit(answer, row.get("prompt") or "")), marked_text(answer)
    number = value(given)
    rights = [value(final_expression(reference)) for reference in references]
    texts = [marked_text(reference) or reference.strip().replace(",", "") for reference in references]
    # 25% is right as 25, and as a quarter.
    numbers = [] if number is None else [number, number / 100] if "%" in given else [number]
    return (
        {
            "exact_match": float(any(each in rights for each in numbers)),
            "strict_match": float(marked is not None and marked in texts),
        },
        {"answer": None if number is None else str(number)},
    )


def marked_text(text: str) -> str | None:
    """The answer by the data set's own rule."""
    match = MARKED.search(text)
    return match[1].strip().replace(",", "") if match else None


def without_asked_unit(answer: str, prompt: str) -> str:
    """``answer`` without a word such as "dozen" behind numbers, if that is what the prompt asks for last."""
    unit = (re.findall(r"(?i)\bhow many (\w+?)s?\b", prompt) or [""])[-1]
    return re.sub(rf"(?i)(?<=\d) {unit}s?\b", "", answer) if re.fullmatch(SCALE, f" {unit}") else answer


def final_expression(text: str) -> str:
    """The last expression of numbers that is given as the answer in the surest form; without such forms the
    last one; empty if there is none. If it has no value, such as a range, then there is no answer.

    Text after the next question that the model asks itself counts only if there is no number before it.
    """
    for reading in readings(plain(text)):
        for form in FORMS:
            begun = (EXPRESSION.match(reading, match.end()) for match in form.finditer(reading))
            found = [
                each for each in begun if each and not (form is MARK and HEADING.match(reading, each.end()))
            ]
            if found:
                return found[-1][0]
        found = [each for each in EXPRESSION.finditer(reading) if not ORDINAL.match(reading, each.end())]
        if found:
            return found[-1][0]
    return ""
