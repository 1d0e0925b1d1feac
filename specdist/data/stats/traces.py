"""The per-token acceptance trace of a run: a record for each candidate that reached the target side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from specdist.data.columns import Column, schema_of


class TracedToken(NamedTuple):
    """A draft token, its features, and whether it was accepted: see :data:`TRACE_COLUMNS`."""

    round: int
    depth: int
    position: int
    token_id: int
    entropy: float
    draft_probability: float
    top_probability: float
    acceptance_probability: float | None
    is_verified: bool
    is_accepted: bool


TRACE_COLUMNS = {
    "row_id": Column(pa.int64(), "input row of the completion"),
    "sample_index": Column(pa.int32(), "which of the row's completions"),
    "round": Column(pa.int32(), "number of the completion's block, from 1"),
    "depth": Column(pa.int32(), "number of tokens before it in the block"),
    "position": Column(pa.int32(), "position in the completion, from 0"),
    "token_id": Column(pa.int32(), "id of the token"),
    "entropy": Column(pa.float32(), "entropy of the draft's distribution, in nats"),
    "draft_probability": Column(
        pa.float32(), "the draft's probability of the token; with temperature 0, by its softmax"
    ),
    "top_probability": Column(pa.float32(), "the draft's probability of its likeliest token"),
    "acceptance_probability": Column(
        pa.float32(), "min(1, P/Q) given the tokens before it; null if the row ended before it"
    ),
    "is_verified": Column(
        pa.bool_(),
        "all tokens before it were accepted, so the target's verification of it counted; false for tokens "
        "that a lossy run accepts unverified",
    ),
    "is_accepted": Column(pa.bool_(), "it became a token of the completion"),
}
TRACE_SCHEMA = schema_of(TRACE_COLUMNS)


def trace_table(rows: Iterable[tuple[int, int, tuple[TracedToken, ...]]]) -> pa.Table:
    """The tokens of rows given as (row_id, sample_index, tokens), sorted by the two."""
    ordered = sorted(rows, key=lambda row: row[:2])
    records = [(row_id, sample, *token) for row_id, sample, tokens in ordered for token in tokens]
    columns = zip(*records, strict=True) if records else [()] * len(TRACE_SCHEMA)
    return pa.table(
        [pa.array(values, field.type) for values, field in zip(columns, TRACE_SCHEMA, strict=True)],
        schema=TRACE_SCHEMA,
    )
