"""The part of a completion that is its answer, for all tasks alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specdist.results.evaluate.reading import Completions
from specdist.sampling.constraints.thinking import THINKING

# Of a run that tells the thinking from the answer (--split_thinking, --max_thinking_tokens).
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
