"""The columns of a shard's file, but those of the input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import pyarrow as pa

OUTPUT_COLUMNS = {
    "row_id": pa.int64(),
    "sample_index": pa.int32(),
    "prompt": pa.string(),
    "completion": pa.string(),
    "completion_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),
    "error": pa.string(),
    "num_prompt_tokens": pa.int32(),
    "num_completion_tokens": pa.int32(),
    "num_spec_steps": pa.int32(),
    "num_draft_tokens": pa.int32(),
    "num_accepted_draft_tokens": pa.int32(),
    "mean_acceptance_length": pa.float64(),
}
# By the option that asks for them, in the order in which they are written.
OPTIONAL_COLUMNS: Mapping[str, Mapping[str, pa.DataType]] = {
    "logprobs": {
        "logprobs": pa.list_(pa.float32()),
        "processed_logprobs": pa.list_(pa.float32()),
        "top_logprob_ids": pa.list_(pa.list_(pa.int32())),
        "top_logprobs": pa.list_(pa.list_(pa.float32())),
    },
    "prompt_logprobs": {
        "prompt_ids": pa.list_(pa.int32()),
        "prompt_logprobs": pa.list_(pa.float32()),
        "top_prompt_logprob_ids": pa.list_(pa.list_(pa.int32())),
        "top_prompt_logprobs": pa.list_(pa.list_(pa.float32())),
    },
    "turns_column": {
        "turn_completions": pa.list_(pa.string()),
        "turn_completion_ids": pa.list_(pa.list_(pa.int32())),
        "turn_finish_reasons": pa.list_(pa.string()),
    },
    "split_thinking": {"completion_thinking": pa.string(), "completion_answer": pa.string()},
}


def columns_of(options: Iterable[str]) -> dict[str, pa.DataType]:
    """Those of a run with these options."""
    given = set(options)
    extra = (columns for option, columns in OPTIONAL_COLUMNS.items() if option in given)
    return OUTPUT_COLUMNS | dict(chain.from_iterable(columns.items() for columns in extra))


def every_column() -> dict[str, pa.DataType]:
    return columns_of(OPTIONAL_COLUMNS)
