"""Multiple choice: is the chosen letter right?

The letters, and what names one, are those of lm-evaluation-harness's generative tasks; where a form occurs
several times, the last counts, since reasoning comes before its result.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from specdist.results.evaluate.config import MULTIPLE_CHOICE, EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Scores
from specdist.results.evaluate.tasks.texts import RowScore, readings, reference_column, score_texts
from specdist.utils.errors import UserError

LETTERS = string.ascii_uppercase
# "The answer is", "Answer:", "The correct option is", and what may stand between that and the choice.
SAID = (
    r"(?i:\b(?:answer|choice|option)\b[^\n.:]{0,60}?(?:\bis\b|:))"
    r"(?:[\s:*_$\"'`(\[{]|\\(?:boxed|text)\{){0,12}"
)
# A letter of its own. Small ones are also words, so they need something that sets them apart.
LETTER = r"([A-Z](?![\w'])|[a-z](?=[)\].,:*]|\s*$))"
# Forms of an answer, the surest first.
FORMS = (
    re.compile(SAID + LETTER),
    re.compile(r"\\boxed\{\s*(?:\\text\{)?\(?([A-Za-z])\)?\s*\}"),
    re.compile(r"^\s*[(*\[_]*([A-Za-z])(?:[).:\]*_]|,(?=\s)| is\b|\s*(?:\n|$))"),
    re.compile(r"(?<!\w)\(([A-Za-z])\)|\*\*\(?([A-Za-z])(?:[).:]|\*\*)"),
)
SAID_TEXT = re.compile(SAID)
# Without A and I, which are words.
BARE = re.compile(r"(?<![\w'.])([B-HJ-Z])(?![\w']|\.\w)")


def score_multiple_choice(completions: Completions, config: EvaluateConfig) -> Scores:
    """The reference is a letter or, with ``--choices_column``, also a choice's text or number from 0."""
    column = check_multiple_choice(completions, config)
    choices_column = config.choices_column
    others = [] if choices_column is None else [choices_column]
    values = [value for each in completions.table[column].to_pylist() for value in _values(each)]
    # Where all are letters, a choice with the text "A" does not make one of them a text.
    are_letters = all(_letter(value) for value in values)
    num_letters = max([4, *(LETTERS.index(letter) + 1 for letter in map(_letter, values) if letter)])

    def score(answer: str, references: list[str], row: Mapping[str, Any]) -> RowScore:
        choices = [str(choice) for choice in row[choices_column] or ()] if choices_column else []
        rights = [
            right_letter(value, choices, row["row_id"], are_letters=are_letters)
            for value in _values(row[column])
        ]
        letter = chosen_letter(answer, choices, len(choices) or num_letters)
        return {"accuracy": float(letter is not None and letter in rights)}, {"answer": letter}

    return score_texts(completions, column, score, cut_at=config.cut_at, others=others)


def check_multiple_choice(completions: Completions, config: EvaluateConfig) -> str:
    """The column of correct answers. Raises :class:`UserError` if it or that of the choices is missing, or
    the choices are no lists."""
    if config.choices_column is not None:
        completions.check_columns({config.choices_column: "--choices_column"})
        kind = completions.table.schema.field(config.choices_column).type
        if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
            raise UserError(
                f"--choices_column {config.choices_column} has type {kind}, but must have a list of texts in "
                "every row, in the order of the letters"
            )
    return reference_column(completions, config.reference_column, MULTIPLE_CHOICE)


def right_letter(reference: Any, choices: Sequence[str], row_id: int, *, are_letters: bool = False) -> str:
    """The letter of the choice that the reference names: a number by its place from 0, a text as a choice's
    text, as a letter, or as digits that are neither. ``are_letters``: all references of the column can be
    letters, and so this is one. Raises :class:`UserError` if it names none."""
    text = str(reference).strip()
    is_number = isinstance(reference, (int, float)) and not (isinstance(reference, bool) and text in choices)
    if not is_number and text in choices and not are_letters:
        return LETTERS[list(choices).index(text)]
    letter = _letter(reference)
    if letter and (not choices or LETTERS.index(letter) < len(choices)):
        return letter
    place = float(reference) if is_number else float(text) if text.isdecimal() else -1.0
    if place.is_integer() and 0 <= place < len(choices):
        return LETTERS[int(place)]
    what = f"one of its {len(choices)} choices, its number from 0, or its letter" if choices else "a letter"
    hint = "" if choices else "; texts and numbers need --choices_column"
    raise UserError(f"row {row_id}: the reference {reference!r} is not {what}{hint}")


def chosen_letter(answer: str, choices: Sequence[str], num_letters: int) -> str | None:
    """The one of the first ``num_letters`` letters that the answer names in the surest form, by itself or by
    the text of its choice; None if it names none. Text after the next question that the model asks itself
    counts only if there is none before it."""
    found = (_letter_in(reading, choices, LETTERS[:num_letters]) for reading in readings(answer))
    return next((letter for letter in found if letter), None)


def _letter_in(text: str, choices: Sequence[str], offered: str) -> str | None:
    alone = text.strip().strip("()[]{}*_.:`$ ")
    if len(alone) == 1 and alone.upper() in offered:
        return alone.upper()
    texts = [_folded(choice) for choice in choices]
    if alone and _folded(alone) in texts:
        return LETTERS[texts.index(_folded(alone))]
    room = 2 * max(map(len, choices), default=0)
    said = [_folded(text[match.end() : match.end() + room]) for match in SAID_TEXT.finditer(text)]
    by_text = [_named(rest, texts, is_start=True) for rest in said[::-1]]
    letters = [_last(form, text, offered) for form in FORMS]
    words = _folded(text)
    found = (
        letters[0],
        next(filter(None, by_text), None),
        *letters[1:],
        _named(words, [each if len(each) > 2 else "" for each in texts]),
        _last(BARE, text, offered),
        _named(words, texts),
    )
    return next(filter(None, found), None)


def _last(form: re.Pattern[str], text: str, offered: str) -> str | None:
    letters = ["".join(filter(None, match.groups())).upper() for match in form.finditer(text)]
    return next((letter for letter in reversed(letters) if letter in offered), None)


def _named(words: str, texts: Sequence[str], *, is_start: bool = False) -> str | None:
    """The only choice whose text is there, or is how the words begin. Of "red" and "dark red" the longer."""
    start = "^" if is_start else r"(?<!\w)"
    there = [text for text in texts if text and re.search(rf"{start}{re.escape(text)}(?!\w)", words)]
    longest = max(there, key=len, default="")
    return LETTERS[texts.index(longest)] if there and all(text in longest for text in there) else None


def _folded(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()


def _values(value: Any) -> list[Any]:
    return [item for item in (value if isinstance(value, list) else [value]) if item is not None]


def _letter(reference: Any) -> str | None:
    """The letter that a reference may be, such as "(b)"."""
    text = reference.strip().strip("(). :").upper() if isinstance(reference, str) else ""
    return text if len(text) == 1 and text in LETTERS else None
