"""Rows that a run has written as the input of another: under other names, and without its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute

from specdist.data.columns import every_column
from specdist.data.formats.input_rows import InputRows
from specdist.data.formats.inputs import Inputs
from specdist.utils.errors import UserError

# A file with all of these is what a run has written.
RESULT_COLUMNS = {"row_id", "sample_index", "completion", "finish_reason"}


def as_input(
    path: str, found: Inputs, *, keep_errors: bool, has_template: bool
) -> tuple[Inputs, dict[str, str]]:
    """Rows that a run has written, without its errors unless they are kept; and new names of columns: of all
    that runs write, and have read of earlier ones, and of ``prompt`` where a template writes that.

    Raises :class:`UserError` for a name that is taken, an option without effect, and if no row is left.
    """
    names = set(found.rows.schema.names)
    is_run = names >= RESULT_COLUMNS
    if keep_errors and not is_run:
        raise UserError(f"--keep_errors has no effect: no run has written --prompts {path}; leave it out")
    renamed = {"prompt": "source_prompt"} if has_template and "prompt" in names else {}
    if is_run:
        # What the run has read of another's is renamed with it, so that no two get one name.
        own = {*every_column()}
        renamed = {name: f"input_{name}" for name in names if re.sub("^(input_)+", "", name) in own}
    elif renamed and "source_prompt" in names:
        raise UserError(
            f"--prompts {path} has a column source_prompt, which is what prompt would be called beside the "
            "prompts of --prompt_template: rename it"
        )
    if not renamed:
        return found, {}
    kept = np.arange(found.rows.num_rows)
    if is_run and not keep_errors:
        reasons = found.rows.read(0, len(kept), ["finish_reason"]).column(0).cast(pa.string())
        kept = kept[pa.compute.not_equal(reasons, "error").fill_null(True).to_numpy()]
        if not len(kept):
            raise UserError(f"--prompts {path} has errors alone: --keep_errors reads these rows, too")
    unusable = {new: found.unusable[old] for new, old in enumerate(kept.tolist()) if old in found.unusable}
    return replace(found, rows=RenamedRows(found.rows, renamed, kept), unusable=unusable), renamed


class RenamedRows(InputRows):
    """Some of the rows, ascending, with some columns ``renamed``."""

    def __init__(self, rows: InputRows, renamed: Mapping[str, str], kept: np.ndarray) -> None:
        self._rows, self._renamed, self._kept = rows, renamed, kept
        fields = [field.with_name(renamed.get(field.name, field.name)) for field in rows.schema]
        self._own = dict(zip((field.name for field in fields), rows.schema.names, strict=True))
        self.schema, self.num_rows = pa.schema(fields, metadata=rows.schema.metadata), len(kept)
        self.ends = None if rows.ends is None else tuple(np.searchsorted(kept, rows.ends).tolist())

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        names = self.schema.names if columns is None else columns
        kept = self._kept[start:stop]
        first, end = (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (0, 0)
        found = self._rows.read(first, end, [self._own[name] for name in names])
        runs = np.split(kept - first, np.flatnonzero(np.diff(kept) > 1) + 1)
        found = pa.concat_tables(found.slice(int(run[0]) if len(run) else 0, len(run)) for run in runs)
        return pa.table(found.columns, schema=pa.schema(map(self.schema.field, names)))

    def limited(self, num_rows: int) -> InputRows:
        return RenamedRows(self._rows, self._renamed, self._kept[:num_rows])
