"""Multiple choice: is the chosen letter right?

The letters, and what names one, are those of lm-evaluation-harness's generative tasks; where a form occurs
several times, the last counts, since reasoning comes before its result.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from specdist.results.evaluate.config import EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Scoring
from specdist.results.evaluate.tasks.texts import RowScore, readings, reference_column, score_texts
from specdist.results.evaluate.tasks.writing import ANSWER, IS, LETTER, SPACED, half_width
from specdist.utils.errors import UserError

LETTERS = string.ascii_uppercase
# A letter of its own, or several, such as "A or B", of which none is chosen. Small letters are also words, so
# they need something that sets them apart.
OWN = rf"(?<!{LETTER})[A-Z](?!{LETTER}|[\d_]|['’]{LETTER})"
OR = "(?:n?or|and|o|y|ou|et|oder|und|или|и|[&/、或和与と및]|또는)"
CAPITALS = rf"{OWN}(?:(?:, ?{OWN})*,? ?{OR} ?{OWN})?"
LETTERS_OF = rf"({CAPITALS}|[a-z](?=[)\].,:*]|\s*$))"
# What may stand before a choice that is named.
MARKUP = r"[\s:*_$\"'`(\[{「『【]|\\(?:boxed|text\w*|math\w*)\{"
NOUN = "(?:option|choice|answer|letter|letra|lettre|opción|opção|буква|вариант|选项|選択肢)"
FILLER = (
    rf"(?:{MARKUP}|(?i:{NOUN}|the|indeed|actually|clearly|definitely|probably|most likely|thus|therefore|la"
    rf"|a(?= l))(?!{LETTER}))"
)
GOOD = "(?:correct|right|best|proper)"
SAID = re.compile(
    rf"(?i:(?:{ANSWER}|\b{GOOD} (?:option|choice|statement|letter)\b|选项(?=[是为])|選択肢(?=は))"
    rf"(?:[*_ \t]{{0,6}}\n|[^\n.:]{{0,60}}?{IS}|】|(?=(?-i:{OWN})))"
    rf"|\b(?:option|choice|correct|ans)[\"']?\s?[:=])(?:{MARKUP}){{0,12}}"
)
SAID_LETTER = re.compile(rf"{FILLER}{{0,12}}{LETTERS_OF}(?!\s?(?:ではな|じゃな|[이가] 아니))")
# Forms of an answer, the surest first: "B is correct", "I choose B"; in a box; at the beginning; set apart.
CHOSEN = re.compile(
    rf"{LETTERS_OF}[)\]*_\"]{{0,3}}\s?(?:选项|[项項])?(?:\s?(?i:is|are) (?:also |the |clearly ){{0,2}}"
    rf"(?:{GOOD}|answer)|正[确確]|[がは]正(?!解ではな)|[이가] (?:정답(?!이 아니)|맞))"
    r"|(?:(?i:\b(?:so|thus|therefore|hence|choos(?:e|ing)|pick|select|go(?:ing)? with|say|it (?:is|must be)"
    r"|it's)\b)|[选選](?![项項択])[择擇]?|よって|したがって|따라서)"
    rf",?{FILLER}{{0,12}}{LETTERS_OF}(?! (?!because|since|as\b)[a-z])"
)
FORMS = (
    re.compile(r"\\boxed\s?\{(?:\\(?:text|math)\w*\{)?[(\s]{0,3}([A-Za-z])(?=\s?[)}.:,\\]|\s\w)"),
    re.compile(
        r"^\s*[(*\[_]{0,6}(?:(?i:option|choice)\s)?[(*]{0,3}([A-Za-z])(?:[).:\]*_、]|,(?=\s)(?! [A-Z]\b)"
        r"|\s[-–—]\s|\s*(?:\n|$)| is\b(?! (?:not|incorrect|wrong|false)\b))"
    ),
    re.compile(r"(?<!\w)\(([A-Za-z])\)|\*\*\(?([A-Za-z])(?:[).:]|\*\*)"),
)
BARE = re.compile(rf"(?<![\d_'’.])(?:(?i:{NOUN}) )?({CAPITALS})(?!\.\w)")
# A line of a list in which the choices are discussed.
LISTED = re.compile(
    r"(?m)^[ \t>*_#(\[-]{0,9}(?:(?i:option|choice) ?|选项|選択肢)?[(*]{0,3}([A-Z])[).:*\]、]+[ *]*\S.*$"
)


def multiple_choice(completions: Completions, config: EvaluateConfig) -> Scoring:
    """The reference is a letter or, with ``--choices_column``, also a choice's text or number from 0. Raises
    :class:`UserError` if its column or that of the choices is missing, or the choices are no lists."""
    column, choices_column = reference_column(completions, config), config.choices_column
    if choices_column is not None:
        completions.check_columns({choices_column: "--choices_column"})
        kind = completions.table.schema.field(choices_column).type
        if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
            raise UserError(
                f"--choices_column {choices_column} has type {kind}, but must have a list of texts in every "
                "row, in the order of the letters"
            )
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

    others = [] if choices_column is None else [choices_column]
    return partial(score_texts, completions, config, column, score, others)


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
    text = half_width(text)
    alone = text.strip().strip("()[]{}*_.:`$。 ")
    if len(alone) == 1 and alone.upper() in offered:
        return alone.upper()
    texts = [_folded(half_width(choice)) for choice in choices]
    if alone and _folded(alone) in texts:
        return LETTERS[texts.index(_folded(alone))]
    rest = _without_list(text)
    words = _folded(rest)
    found = (
        _said(text, texts, offered),
        _last(CHOSEN, text, offered),
        *(_last(form, rest, offered) for form in FORMS),
        _named(words, [each if len(each) > 2 else "" for each in texts]),
        _last(BARE, rest, offered, ("A", "I") if re.search("[A-Za-z]{2}", text) else ()),
        _named(words, texts),
    )
    return next((letter for letter in found if letter is not None), None) or None


def _said(text: str, texts: Sequence[str], offered: str) -> str | None:
    """What follows the last "the answer is" that names a choice, by its text or its letter."""
    room = 2 * max(map(len, texts), default=0)
    named = ["" if len(each) == 1 and each.isalpha() else each for each in texts]
    for match in reversed([*SAID.finditer(text)]):
        by_text = _named(_folded(text[match.end() : match.end() + room]), named, is_start=True)
        letter = SAID_LETTER.match(text, match.end())
        by_letter = _only(letter[1], offered) if letter else None
        if by_text or by_letter is not None:
            return by_text or by_letter
    return None


def _last(form: re.Pattern[str], text: str, offered: str, words: Sequence[str] = ()) -> str | None:
    """The letter of the last match that has any and is none of ``words``; empty if it has several."""
    matches = (match for match in reversed([*form.finditer(text)]) if match[0] not in words)
    letters = (_only(" ".join(filter(None, match.groups())), offered) for match in matches)
    return next((letter for letter in letters if letter is not None), None)


def _only(letters: str, offered: str) -> str | None:
    found = {each.upper() for each in re.findall(rf"(?<!{LETTER})[A-Za-z](?!{LETTER})", letters)} & {*offered}
    return None if not found else found.pop() if len(found) == 1 else ""


def _without_list(text: str) -> str:
    """Leave out the lines of a list of choices, of which one that begins the text may be an answer."""
    lines = [*LISTED.finditer(text)]
    letters = [line[1] for line in lines]
    if lines and not text[: lines[0].start()].strip() and (letters[0] != "A" or letters.count("A") > 1):
        del lines[0]
    starts = {line.start() for line in lines} if len({line[1] for line in lines}) > 1 else set()
    return LISTED.sub(lambda line: "" if line.start() in starts else line[0], text)


def _named(words: str, texts: Sequence[str], *, is_start: bool = False) -> str | None:
    """The only choice whose text is there, or is how the words begin. Of "red" and "dark red" the longer."""
    start = "^" if is_start else f"(?<!{SPACED})"
    there = [text for text in texts if text and re.search(rf"{start}{re.escape(text)}(?!{SPACED})", words)]
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
