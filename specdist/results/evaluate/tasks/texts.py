"""Completions compared with texts: the part of a completion that is its answer, what all tasks share that
compare it with the references of its row, and the plainest of them: word for word."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdist.results.evaluate.config import EXACT_MATCH, EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Metric, Scores
from specdist.sampling.constraints.masker import THINKING
from specdist.utils.errors import UserError

# The column of a run that tells the thinking from the answer (--split_thinking, --max_thinking_tokens).
ANSWER_COLUMN = "completion_answer"
# Where a model that does not stop asks itself the next question, as in the examples of its prompt: the stop
# strings of lm-evaluation-harness's tasks, at the beginning of a line.
NEXT_QUESTION = re.compile(r"\n[ \t>*_#]*(?:Question|Problem|Q)\b[ \t]*\d*[ \t*_]*:")


def answer_columns(completions: Completions) -> list[str]:
    """The columns that :func:`answer_of` reads."""
    split = [ANSWER_COLUMN] if ANSWER_COLUMN in completions.table.column_names else []
    return ["prompt", "completion", *split]


def answer_of(row: Mapping[str, Any], cut_at: Sequence[str] | None) -> str:
    """The completion without its thinking, cut at the first of the strings ``cut_at``; empty if the thinking
    has no end."""
    split = row.get(ANSWER_COLUMN)
    return cut(without_thinking(row["completion"], row["prompt"]) if split is None else split, cut_at)


def num_only_thinking(rows: Sequence[Mapping[str, Any]]) -> int:
    """How many of the rows say something, but give no answer."""
    return sum(bool(row["completion"].strip()) and not answer_of(row, None).strip() for row in rows)


def without_thinking(completion: str, prompt: str | None = None) -> str:
    """What follows the last end of thinking. ``prompt``: chat templates may begin the thinking."""
    ends = [completion.rfind(end) + len(end) for end in THINKING if end in completion]
    if not ends and (prompt or "").rstrip().endswith(tuple(THINKING.values())):
        return ""
    answer = completion[max(ends, default=0) :]
    return cut(answer, list(THINKING.values()))


def cut(text: str, strings: Sequence[str] | None) -> str:
    """``text`` before the first occurrence of any of the strings."""
    ends = [text.find(string) for string in strings or ()]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def readings(answer: str) -> list[str]:
    """The answer up to the next question that the model asks itself, then all of it: the first of these in
    which a task finds what it looks for counts."""
    next_question = NEXT_QUESTION.search(answer)
    return [answer] if next_question is None else [answer[: next_question.start()], answer]


REFERENCE = "reference"
ERROR = "error"
# Columns of every result, before the task's.
IDENTITY_COLUMNS = ("row_id", "sample_index", "finish_reason")
# A function from (answer, references, row) to numbers by metric, and text by name.
RowScore = tuple[Mapping[str, float], Mapping[str, str | None]]
RowScorer = Callable[[str, list[str], Mapping[str, Any]], RowScore]


def reference_column(completions: Completions, wanted: str | None, task: str, *others: str) -> str:
    """The column ``wanted``, else the first existing one of ``others`` and ``reference``."""
    names = [wanted] if wanted is not None else [*others, REFERENCE]
    found = [name for name in names if name in completions.table.column_names]
    if not found:
        completions.check_columns({names[-1]: f"--task {task} (--reference_column)"})
    return found[0]


def as_references(value: Any) -> list[str]:
    """The accepted texts: one, several, or none. A number without decimals is written without a point."""
    values = value if isinstance(value, list) else [value]
    whole = [int(item) if isinstance(item, float) and item.is_integer() else item for item in values]
    return [str(item) for item in whole if item is not None]


def identity_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The columns that every result begins with."""
    return {name: [row[name] for row in rows] for name in IDENTITY_COLUMNS}


def score_texts(
    completions: Completions,
    column: str,
    scorer: RowScorer,
    *,
    cut_at: Sequence[str] | None,
    others: Sequence[str] = (),
) -> Scores:
    """Score each row, then take means over prompts.

    A row that ended with an error gets 0. Rows without a reference are left out and counted. Raises
    :class:`UserError` if no row has a reference.
    """
    names = [*IDENTITY_COLUMNS, *answer_columns(completions), column, *others]
    all_rows = completions.rows(*dict.fromkeys(names))
    rows = [row for row in all_rows if as_references(row[column])]
    if not rows:
        raise UserError(f"the column {column} of {completions.path} contains no references")
    numbers: dict[str, list[float]] = {}
    texts: dict[str, list[str | None]] = {}
    for row in rows:
        found, notes = scorer(answer_of(row, cut_at), as_references(row[column]), row)
        has_failed = row["finish_reason"] == ERROR
        for name, value in found.items():
            numbers.setdefault(name, []).append(0.0 if has_failed else value)
        for name, text in notes.items():
            texts.setdefault(name, []).append(None if has_failed else text)
    row_ids = [row["row_id"] for row in rows]
    return Scores(
        columns={**identity_columns(rows), **texts, **numbers},
        metrics={name: Metric.of(row_ids, values) for name, values in numbers.items()},
        facts={
            "reference_column": column,
            "num_rows_without_reference": len(all_rows) - len(rows),
            "num_only_thinking": num_only_thinking(rows),
        },
    )


WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
