"""Completions compared with references: word for word, by the letter of a choice, or by ROUGE."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from specdist.evaluation.config import EXACT_MATCH, MULTIPLE_CHOICE, ROUGE, EvaluateConfig
from specdist.evaluation.reading import Completions
from specdist.evaluation.scores import Scores
from specdist.evaluation.text_tasks import RowScore, reference_column, score_texts
from specdist.utils.errors import UserError

WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
LETTERS = string.ascii_uppercase
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
# Forms of an answer, the surest first.
ANSWER_FORMS = (
    re.compile(r"(?i:answer\s*(?:is|:)?)[\s:*]*\(?([A-Z])(?![\w'])"),
    re.compile(r"^\s*[(*\[]*([A-Z])(?=[).:,\]*]|\s*$|\s*\n)"),
    re.compile(r"\(([A-Z])\)"),
    # Without A and I, which are words.
    re.compile(r"(?<![\w'])([B-HJ-Z])(?![\w'])"),
)


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


def score_multiple_choice(completions: Completions, config: EvaluateConfig) -> Scores:
    """The reference is a letter or, with ``--choices_column``, also a choice's text or number from 0."""
    column = check_multiple_choice(completions, config)
    choices_column = config.choices_column
    others = [] if choices_column is None else [choices_column]

    def score(completion: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
        choices = [str(choice) for choice in row[choices_column] or ()] if choices_column else []
        rights = [right_letter(reference, choices, row["row_id"]) for reference in references]
        answer = chosen_letter(completion, choices)
        return {"accuracy": float(answer is not None and answer in rights)}, {"answer": answer}

    return score_texts(completions, column, score, cut_at=config.cut_at, others=others)


def check_multiple_choice(completions: Completions, config: EvaluateConfig) -> str:
    """The column of correct answers. Raises :class:`UserError` if it or that of the choices is missing."""
    if config.choices_column is not None:
        completions.check_columns({config.choices_column: "--choices_column"})
    return reference_column(completions, config.reference_column, MULTIPLE_CHOICE)


def right_letter(reference: str, choices: Sequence[str], row_id: int) -> str:
    """The letter of the choice that the reference names. Raises :class:`UserError` if it names none."""
    text = reference.strip()
    if text in choices:
        return LETTERS[list(choices).index(text)]
    if text.isdecimal() and int(text) < len(choices):
        return LETTERS[int(text)]
    letter = text.strip("().: ").upper()
    if len(letter) == 1 and letter in LETTERS and (not choices or LETTERS.index(letter) < len(choices)):
        return letter
    what = f"one of its {len(choices)} choices, its number from 0, or its letter" if choices else "a letter"
    hint = "" if choices else "; texts and numbers need --choices_column"
    raise UserError(f"row {row_id}: the reference {reference!r} is not {what}{hint}")


def chosen_letter(completion: str, choices: Sequence[str]) -> str | None:
    """The choice with this text, else the letter that the text names in the surest form; None without one."""
    text = " ".join(completion.split()).rstrip(".").casefold()
    for letter, choice in zip(LETTERS, choices, strict=False):
        if text and text == " ".join(choice.split()).rstrip(".").casefold():
            return letter
    offered = LETTERS[: len(choices)] if choices else LETTERS
    for form in ANSWER_FORMS:
        for match in form.finditer(completion):
            if match[1].upper() in offered:
                return match[1].upper()
    return None


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
