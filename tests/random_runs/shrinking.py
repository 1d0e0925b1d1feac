"""Makes a failing case smaller for as long as it still fails."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from tests.random_runs.case import Case, Row
from tests.random_runs.jobs import JobCase

DEFAULT, DEFAULT_ROW = Case(), Row()
# Less is simpler: a half, then one less. Of other numbers the default is the simplest.
COUNTS = ("num_samples", "max_new_tokens", "cap", "num_ahead_tokens", "num_branches", "forced_room")


AnyCase = TypeVar("AnyCase", bound=Case | JobCase)


def shrunk(case: AnyCase, fails: Callable[[AnyCase], bool], *, limit_s: float) -> AnyCase:
    """The smallest one that was found within this time. ``fails`` is asked of valid cases alone."""
    end = time.monotonic() + limit_s
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in smaller_cases(case):
            if time.monotonic() > end:
                return case
            if smaller != case and smaller.is_valid and fails(smaller):
                case, is_smaller = smaller, True
                break
    return case


def smaller_cases(case: AnyCase) -> Iterator[AnyCase]:
    """What says most at once comes first."""
    found: Iterator[Any] = case.smaller() if isinstance(case, JobCase) else _smaller(case)
    yield from found


def _smaller(case: Case) -> Iterator[Case]:
    yield from _fewer_rows(case)
    for each in dataclasses.fields(Case):
        if each.name != "rows" and not (each.name in COUNTS and getattr(case, each.name) < each.default):
            yield replace(case, **{each.name: getattr(DEFAULT, each.name)})
    # Options that others need, with these.
    yield replace(case, num_ahead_tokens=0, num_branches=0, shapes=(), has_chooser=False)
    yield replace(case, regex=None, forced_room=0, rows=tuple(replace(row, regex=None) for row in case.rows))
    for name in ("shapes", "bad_words", "stop"):
        value: tuple[Any, ...] = getattr(case, name)
        for index in range(len(value)):
            changes: dict[str, Any] = {name: value[:index] + value[index + 1 :]}
            yield replace(case, **changes)
    for name in case.default:
        yield replace(case, default={key: value for key, value in case.default.items() if key != name})
    for name in COUNTS:
        number = getattr(case, name)
        for less in dict.fromkeys([number // 2, number - 1]):
            if min(1, getattr(DEFAULT, name)) <= less < number:
                yield replace(case, **{name: less})
    for index, row in enumerate(case.rows):
        for smaller in _smaller_rows(row):
            yield replace(case, rows=(*case.rows[:index], smaller, *case.rows[index + 1 :]))


def _fewer_rows(case: Case) -> Iterator[Case]:
    rows = case.rows
    half = len(rows) // 2
    parts = [rows[:half], rows[half:], *(rows[:index] + rows[index + 1 :] for index in range(len(rows)))]
    yield from (replace(case, rows=part) for part in parts if part)


def _smaller_rows(row: Row) -> Iterator[Row]:
    for each in dataclasses.fields(Row):
        if each.name != "prompt":
            yield replace(row, **{each.name: getattr(DEFAULT_ROW, each.name)})
    if row.options:
        for name in row.options:
            own: dict[str, Any] = {key: value for key, value in row.options.items() if key != name}
            yield replace(row, options=own)
    prompt = row.prompt
    half = len(prompt) // 2
    for part in (prompt[:half], prompt[half:], prompt[:-1], prompt[1:], (1,) * len(prompt)):
        if part and part != prompt:
            yield replace(row, prompt=part)
