"""What tasks share that compare a completion with the references of its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Groups, Scores
from specdist.results.evaluate.tasks.answers import answer_columns, answer_of, num_only_thinking
from specdist.utils.errors import UserError

REFERENCE = "reference"
ERROR = "error"
# Columns of every result, before the task's.
IDENTITY_COLUMNS = ("row_id", "sample_index", "finish_reason")
# From (answer, references, row) to numbers by metric, and text by name.
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
    groups = Groups.of([row["row_id"] for row in rows])
    return Scores(
        columns={**identity_columns(rows), **texts, **numbers},
        metrics={name: groups.mean(values) for name, values in numbers.items()},
        prompt_ids_P=groups.prompt_ids_P,
        facts={
            "reference_column": column,
            "num_rows_without_reference": len(all_rows) - len(rows),
            "num_only_thinking": num_only_thinking(rows),
        },
    )
