"""Tasks that compare a completion with the references beside it: what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdist.evaluation.reading import Completions
from specdist.evaluation.scores import Groups, Scores
from specdist.utils.errors import UserError

REFERENCE = "reference"
ERROR = "error"
# Columns of every result, before the task's.
IDENTITY_COLUMNS = ("row_id", "sample_index", "finish_reason")
# From (completion, references, row) to numbers by metric, and text by name.
RowScore = tuple[Mapping[str, float], Mapping[str, str | None]]
RowScorer = Callable[[str, list[str], Mapping[str, Any]], RowScore]


def reference_column(completions: Completions, wanted: str | None, task: str, *others: str) -> str:
    """The column ``wanted``, else the first there is of ``others`` and ``reference``."""
    names = [wanted] if wanted is not None else [*others, REFERENCE]
    found = [name for name in names if name in completions.table.column_names]
    if not found:
        completions.check_columns({names[-1]: f"--task {task} (--reference_column)"})
    return found[0]


def cut(text: str, strings: Sequence[str] | None) -> str:
    """``text`` before the first of the strings in it."""
    ends = [text.find(string) for string in strings or ()]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def as_references(value: Any) -> list[str]:
    """One text or several, of which one has to be met. Empty where there is none."""
    values = value if isinstance(value, list) else [value]
    return [item if isinstance(item, str) else _number_text(item) for item in values if item is not None]


def _number_text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def score_texts(
    completions: Completions,
    column: str,
    scorer: RowScorer,
    *,
    cut_at: Sequence[str] | None,
    others: Sequence[str] = (),
) -> Scores:
    """Every row by itself, then means over prompts.

    A row that has ended with an error has no answer, and gets 0. Rows without a reference are left out, and
    counted. Raises :class:`UserError` where no row has one.
    """
    names = [*IDENTITY_COLUMNS, "completion", column, *others]
    all_rows = completions.rows(*names)
    rows = [row for row in all_rows if as_references(row[column])]
    if not rows:
        raise UserError(f"the column {column} of {completions.path} contains no references")
    numbers: dict[str, list[float]] = {}
    texts: dict[str, list[str | None]] = {}
    for row in rows:
        found, notes = scorer(cut(row["completion"], cut_at), as_references(row[column]), row)
        has_failed = row["finish_reason"] == ERROR
        for name, value in found.items():
            numbers.setdefault(name, []).append(0.0 if has_failed else value)
        for name, text in notes.items():
            texts.setdefault(name, []).append(None if has_failed else text)
    groups = Groups.of([row["row_id"] for row in rows])
    identity = {name: [row[name] for row in rows] for name in IDENTITY_COLUMNS}
    return Scores(
        columns={**identity, **texts, **numbers},
        metrics={name: groups.mean(values) for name, values in numbers.items()},
        prompt_ids_P=groups.prompt_ids_P,
        facts={"reference_column": column, "num_rows_without_reference": len(all_rows) - len(rows)},
    )
