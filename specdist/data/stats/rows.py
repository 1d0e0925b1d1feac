"""One completion, and the Arrow table of a finished shard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from specdist.data.columns import OUTPUT_COLUMNS, columns_of, every_column, schema_of
from specdist.data.stats.traces import TracedToken

# The names and labels of `datasets` features; it ignores those of columns that it does not know.
KEPT_METADATA = b"huggingface"
# "true", or "false" for what a lossy run has written.
EXACT_METADATA = b"specdist.exact"


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """One finished completion of one input row.

    ``row_id`` counts input rows from 0 over the whole run. ``prompt`` is the text that was tokenized, None if
    there is none. A row with ``finish_reason="error"`` has the reason in ``error``, and no completion or
    counts. ``trace`` holds the drafted tokens of a run with ``--trace``; what is None by default are columns
    of ``OPTIONAL_COLUMNS``.
    """

    row_id: int
    sample_index: int
    prompt: str | None
    completion: str = ""
    completion_ids: tuple[int, ...] = ()
    finish_reason: Literal["stop", "length", "repetition", "error"]
    error: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    trace: tuple[TracedToken, ...] = ()
    logprobs: Sequence[float] | None = None
    processed_logprobs: Sequence[float] | None = None
    top_logprob_ids: Sequence[Sequence[int]] | None = None
    top_logprobs: Sequence[Sequence[float]] | None = None
    prompt_ids: Sequence[int] | None = None
    prompt_logprobs: Sequence[float | None] | None = None
    top_prompt_logprob_ids: Sequence[Sequence[int] | None] | None = None
    top_prompt_logprobs: Sequence[Sequence[float] | None] | None = None
    turn_completions: Sequence[str] | None = None
    turn_completion_ids: Sequence[Sequence[int]] | None = None
    turn_finish_reasons: Sequence[str] | None = None
    rollout_attempts: int | None = None
    rollout_rejected_tokens: int | None = None
    rollout_score: float | None = None
    rollout_columns: str | None = None
    rollout_messages: str | None = None
    completion_thinking: str | None = None
    completion_answer: str | None = None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per speculative step with the bonus token, as vLLM defines it; None without any step."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else None

    def to_json(self) -> bytes:
        """One line without its end; :meth:`from_json` is the inverse, for any text."""
        # Not as \u escapes: JSON would join a lone high surrogate with a low one after it.
        return json.dumps(vars(self), ensure_ascii=False).encode("utf-8", "surrogatepass")

    @staticmethod
    def from_json(line: bytes) -> RowResult:
        values = json.loads(line.decode("utf-8", "surrogatepass"))
        values["completion_ids"] = tuple(values["completion_ids"])
        values["trace"] = tuple(TracedToken(*token) for token in values.get("trace", ()))
        return RowResult(**values)


def output_schema(input_schema: pa.Schema, *, is_exact: bool, options: Sequence[str] = ()) -> pa.Schema:
    """The output columns of a run with these ``options``, then the input columns; an input column ``prompt``
    replaces the output's.

    The metadata tell whether the completions follow the target's own distribution.
    """
    columns = columns_of(options)
    output_fields = [
        input_schema.field(name) if name in input_schema.names else pa.field(name, column.type)
        for name, column in columns.items()
    ]
    input_fields = [field for field in input_schema if field.name not in columns]
    metadata = {key: value for key, value in (input_schema.metadata or {}).items() if key == KEPT_METADATA}
    metadata[EXACT_METADATA] = json.dumps(is_exact).encode()
    return pa.schema(output_fields + input_fields, metadata=metadata)


def shard_table(
    inputs: pa.Table,
    results: Sequence[RowResult],
    *,
    first_row: int,
    num_samples: int | Sequence[int],
    is_exact: bool = True,
    options: Sequence[str] = (),
) -> pa.Table:
    """The output of a shard: its input rows in order, each with ``num_samples`` completions, or with its own
    of these numbers.

    ``inputs`` are the shard's rows from row_id ``first_row`` on; ``results`` come in any order. Raises
    ValueError unless there is exactly one result for each sample of each row.
    """
    ordered = sorted(results, key=lambda result: (result.row_id, result.sample_index))
    counts = np.broadcast_to(np.asarray(num_samples), inputs.num_rows)
    row_ids = np.repeat(np.arange(first_row, first_row + inputs.num_rows), counts)
    samples = np.arange(len(row_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = [(result.row_id, result.sample_index) for result in ordered]
    expected = list(zip(row_ids.tolist(), samples.tolist(), strict=True))
    if found != expected:
        missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        raise ValueError(
            f"{inputs.num_rows} rows from {first_row} on need {len(expected)} results; of the "
            f"{len(found)} given {len(unexpected)} are unexpected {unexpected[:5]}, and {len(missing)} are "
            f"missing {missing[:5]}, as (row_id, sample_index)"
        )
    rows = None if (counts == 1).all() else row_ids - first_row
    schema = output_schema(inputs.schema, is_exact=is_exact, options=options)
    columns = [
        repeated(inputs.column(field.name), rows)
        if field.name in inputs.column_names
        else pa.array([_value(result, field.name) for result in ordered], field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def repeated(column: pa.ChunkedArray, rows: np.ndarray | None) -> pa.ChunkedArray:
    """The column's values at these rows; all where None."""
    if rows is None:
        return column
    # What pa.array does, which would import pandas if that is there: before the first token, too.
    indices = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows.astype(np.int64))])
    try:
        return column.take(indices)
    except pa.ArrowNotImplementedError:  # views of text, and run ends
        chunks = [chunk for row in rows for chunk in column.slice(row, 1).chunks]
        return pa.chunked_array(chunks, column.type)


def results_table(results: Sequence[RowResult], schema: pa.Schema | None = None) -> pa.Table:
    """Results in the order of rows and samples, without their input rows: the input columns of ``schema``,
    that of a run's shards, are null; without it there are only the output columns."""
    ordered = sorted(results, key=lambda result: (result.row_id, result.sample_index))
    schema, known = schema or schema_of(OUTPUT_COLUMNS), every_column()
    columns = [
        pa.array([_value(result, field.name) for result in ordered], _plain_type(field.type)).cast(field.type)
        if field.name in known
        else pa.nulls(len(ordered), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _value(result: RowResult, name: str) -> object:
    """A column's value; text has U+FFFD for each unpaired surrogate, which has no UTF-8."""
    value = getattr(result, name)
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return value
