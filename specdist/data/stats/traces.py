"""The per-token acceptance trace of a run: a record for each draft token that reached the target side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa


class TracedToken(NamedTuple):
    """A draft token, its features, and whether it was accepted.

    Attributes:
        round: round of the sequence, from 1; 0 is the pass over the prompt.
        depth: number of tokens before it in the block.
        position: position in the completion, from 0.
        entropy, draft_probability, top_probability: see :class:`specdist.policies.DraftFeatures`.
        acceptance_probability: min(1, P/Q) given the tokens before it; None if no target pass had the token.
        is_verified: all tokens before it were accepted without ending the row, and the target's verification
            counted; it does not for tokens that a lossy run commits unverified.
        is_accepted: it became a token of the completion.
        head_probability: a trained head's estimate; None without a head, or if no pass computed it.
    """

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
    head_probability: float | None = None


TRACE_SCHEMA = pa.schema(
    {
        "row_id": pa.int64(),
        "sample_index": pa.int32(),
        "round": pa.int32(),
        "depth": pa.int32(),
        "position": pa.int32(),
        "token_id": pa.int32(),
        "entropy": pa.float32(),
        "draft_probability": pa.float32(),
        "top_probability": pa.float32(),
        "acceptance_probability": pa.float32(),
        "is_verified": pa.bool_(),
        "is_accepted": pa.bool_(),
        "head_probability": pa.float32(),
    }
)


def trace_table(rows: Iterable[tuple[int, int, tuple[TracedToken, ...]]]) -> pa.Table:
    """The tokens of rows given as (row_id, sample_index, tokens), sorted by the two."""
    ordered = sorted(rows, key=lambda row: row[:2])
    records = [(row_id, sample, *token) for row_id, sample, tokens in ordered for token in tokens]
    columns = zip(*records, strict=True) if records else [()] * len(TRACE_SCHEMA)
    return pa.table(
        [pa.array(values, field.type) for values, field in zip(columns, TRACE_SCHEMA, strict=True)],
        schema=TRACE_SCHEMA,
    )
