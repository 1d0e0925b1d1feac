"""The columns of a shard's file, but those of the input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

import pyarrow as pa


class Column(NamedTuple):
    """A column's type, and what its values mean."""

    type: pa.DataType
    meaning: str


def schema_of(columns: Mapping[str, Column]) -> pa.Schema:
    return pa.schema([(name, column.type) for name, column in columns.items()])


OUTPUT_COLUMNS = {
    "row_id": Column(pa.int64(), "number of the input row, from 0"),
    "sample_index": Column(pa.int32(), "which of the row's completions, 0 .. `num_samples` - 1"),
    "prompt": Column(
        pa.string(), "the text given to the model, chat template applied; null if the row has no text"
    ),
    "completion": Column(
        pa.string(), "the generated text up to the stop, which is not included; empty if the row has an error"
    ),
    "completion_ids": Column(pa.list_(pa.int32()), "token ids of the completion, including the stop token"),
    "finish_reason": Column(
        pa.string(),
        "`stop` (an end token or a stop string), `length` (a length limit was reached), `repetition` (with "
        "`--stop_repeats`: a loop) or `error`",
    ),
    "error": Column(pa.string(), "why the row has no completion; null if it has one"),
    "num_prompt_tokens": Column(
        pa.int32(), "number of tokens of the prompt; of several turns, of all their prompts"
    ),
    "num_completion_tokens": Column(
        pa.int32(), "number of tokens of the completion, the length of `completion_ids`"
    ),
    "num_spec_steps": Column(
        pa.int32(), "number of target passes with at least one draft token of this completion"
    ),
    "num_draft_tokens": Column(pa.int32(), "draft tokens proposed to the target"),
    "num_accepted_draft_tokens": Column(pa.int32(), "number of these that were accepted"),
    "mean_acceptance_length": Column(
        pa.float64(),
        "tokens per speculative step, 1 + accepted / steps, as vLLM defines it; null without any step",
    ),
}
# The columns by the option that asks for them, in the order in which they are written.
OPTIONAL_COLUMNS: Mapping[str, Mapping[str, Column]] = {
    "logprobs": {
        "logprobs": Column(
            pa.list_(pa.float32()),
            "with `--logprobs`: the target's log-probability of every token of `completion_ids`, of its own "
            "distribution, as a forward pass over the text gives it",
        ),
        "processed_logprobs": Column(
            pa.list_(pa.float32()),
            "with `--logprobs`: the same of the distribution that the token was drawn from, after "
            "penalties, temperature and filters; with temperature 0, after all but these two",
        ),
        "top_logprob_ids": Column(
            pa.list_(pa.list_(pa.int32())),
            "with `--logprobs N`: for every token, the ids of the N likeliest before processing, likeliest "
            "first",
        ),
        "top_logprobs": Column(
            pa.list_(pa.list_(pa.float32())), "with `--logprobs N`: their log-probabilities"
        ),
    },
    "prompt_logprobs": {
        "prompt_ids": Column(pa.list_(pa.int32()), "with `--prompt_logprobs`: token ids of the prompt"),
        "prompt_logprobs": Column(
            pa.list_(pa.float32()),
            "with `--prompt_logprobs`: the target's log-probability of every token of `prompt_ids` after "
            "those before it; null for the first",
        ),
        "top_prompt_logprob_ids": Column(
            pa.list_(pa.list_(pa.int32())),
            "with `--prompt_logprobs N`: for every token but the first, the ids of the N likeliest in its "
            "place, likeliest first",
        ),
        "top_prompt_logprobs": Column(
            pa.list_(pa.list_(pa.float32())), "with `--prompt_logprobs N`: their log-probabilities"
        ),
    },
    "turns_column": {
        "turn_completions": Column(
            pa.list_(pa.string()),
            "with `--turns_column` or `--rollout`: the generated text of every turn; `completion`, "
            "`completion_ids`, `finish_reason` and `prompt` are then those of the last, and numbers the sums "
            "of all",
        ),
        "turn_completion_ids": Column(pa.list_(pa.list_(pa.int32())), "the token ids of every turn"),
        "turn_finish_reasons": Column(pa.list_(pa.string()), "how every turn ended"),
    },
    "rollout": {
        "rollout_attempts": Column(pa.int32(), "with `--rollout`: attempts until one was accepted, with it"),
        "rollout_rejected_tokens": Column(pa.int32(), "tokens of the attempts that were rejected"),
        "rollout_score": Column(pa.float64(), "the score that the function gave, or null"),
        "rollout_columns": Column(pa.string(), "what else it gave, as a JSON object; null if nothing"),
        "rollout_messages": Column(
            pa.string(), "the whole conversation of the last attempt, as a JSON list of messages"
        ),
    },
    "split_thinking": {
        "completion_thinking": Column(
            pa.string(),
            "with `--split_thinking` or `--max_thinking_tokens`: the text before the end of thinking, "
            "without the markers; null if the completion has no thinking",
        ),
        "completion_answer": Column(pa.string(), "the text after it; empty if a limit was reached before"),
    },
}


def columns_of(options: Iterable[str]) -> dict[str, Column]:
    """The output columns of a run with these options."""
    given = set(options)
    extra = (columns for option, columns in OPTIONAL_COLUMNS.items() if option in given)
    return OUTPUT_COLUMNS | dict(chain.from_iterable(columns.items() for columns in extra))


def every_column() -> dict[str, Column]:
    return columns_of(OPTIONAL_COLUMNS)
