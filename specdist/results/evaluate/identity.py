"""The comparison of two runs, token by token.

N rows that both runs have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from specdist.results.evaluate.reading import Completions
from specdist.utils.errors import UserError

KEY = ("row_id", "sample_index")
# How rows can differ: by a token, by their length or finish reason, or by an error in one run.
TOKEN, LENGTH, FAILED = "token", "length", "error"


def compare_tokens(
    first: Completions, second: Completions
) -> tuple[dict[str, Any], Mapping[str, Sequence[Any]]]:
    """Compare row by row.

    Returns the document, and for differences.arrow, per row [N], the kind of the difference and its position:
    None for rows with the same tokens and the same finish reason. Raises :class:`UserError` if no row is in
    both runs, or prompts differ.
    """
    names = [*KEY, "prompt", "completion_ids", "finish_reason"]
    rows = [{(row[0], row[1]): row for row in _rows_of(run.table, names)} for run in (first, second)]
    keys = sorted(rows[0].keys() & rows[1].keys())
    if not keys:
        raise UserError(f"{first.path} and {second.path} have no row in common, by row_id and sample_index")
    found = []
    for key in keys:
        (*_, prompt, ours, our_end), (*_, other, theirs, their_end) = rows[0][key], rows[1][key]
        if prompt != other:
            raise UserError(
                f"--against {second.path}: row {key[0]} has a different prompt there; compare runs over "
                "the same prompts (a chat template may tell the date of its run)"
            )
        found.append(_compare(ours, theirs, our_end, their_end))
    kinds = Counter(kind for kind, _ in found if kind is not None)
    positions = [position for _, position in found if position is not None]
    num_identical = len(keys) - len(positions)
    document = {
        "num_rows": len(keys),
        "num_rows_only_in_first": len(rows[0]) - len(keys),
        "num_rows_only_in_second": len(rows[1]) - len(keys),
        "num_identical": num_identical,
        "share_identical": num_identical / len(keys),
        "kinds_of_difference": dict(kinds),
        "median_first_difference": float(np.median(positions)) if positions else None,
        "settings_that_differ": _settings_that_differ(first, second),
    }
    columns = {
        **{name: [key[place] for key in keys] for place, name in enumerate(KEY)},
        "difference": [kind for kind, _ in found],
        "first_difference": [position for _, position in found],
    }
    return document, columns


def _rows_of(table: pa.Table, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    ids = (np.asarray(each.values) for each in table["completion_ids"])
    return zip(*(ids if name == "completion_ids" else table[name].to_pylist() for name in names), strict=True)


def _settings_that_differ(first: Completions, second: Completions) -> list[str]:
    """Fields of the manifests' fingerprints with other values; none where one is a merged file, which does
    not record how its run was generated."""
    if first.manifest is None or second.manifest is None:
        return []
    ours, theirs = first.manifest.fingerprint, second.manifest.fingerprint
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _compare(
    ours: np.ndarray, theirs: np.ndarray, our_end: str, their_end: str
) -> tuple[str | None, int | None]:
    """The kind of difference between two completions, and its position."""
    shorter = min(len(ours), len(theirs))
    unequal = np.flatnonzero(ours[:shorter] != theirs[:shorter])
    position = int(unequal[0]) if len(unequal) else shorter
    if (our_end == FAILED) != (their_end == FAILED):
        return FAILED, position
    if len(unequal):
        return TOKEN, position
    if len(ours) != len(theirs) or our_end != their_end:
        return LENGTH, position
    return None, None
