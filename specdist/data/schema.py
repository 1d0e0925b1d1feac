"""What everything in a run's folder means: columns, a trace's columns, statistics, totals.

Here alone it is written down; ``jobs/show.py --schema``, the README and the card in every run's folder repeat
it. Types are not repeated here: they come from what is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

import pyarrow as pa

from specdist.data.rows import OUTPUT_COLUMNS
from specdist.data.traces import TRACE_SCHEMA
from specdist.stats.shard import Stats
from specdist.utils.markdown import code, plain, table

COLUMNS = {
    "row_id": "input row, from 0",
    "sample_index": "which of its completions, 0 .. `num_samples` - 1",
    "prompt": "what the model was given, the chat template applied; null where the row has no text",
    "completion": "the answer up to the stop, which it does not contain; empty in a row with an error",
    "completion_ids": "token ids of the answer, the stop token included",
    "finish_reason": "`stop` (an end token or a stop string), `length` (no room for more) or `error`",
    "error": "why the row has no completion; null in every other row",
    "num_prompt_tokens": "tokens of the prompt",
    "num_completion_tokens": "tokens of the answer, as many as `completion_ids` has",
    "num_spec_steps": "target passes with at least one draft token of this row",
    "num_draft_tokens": "draft tokens that became candidates for the target",
    "num_accepted_draft_tokens": "of these, the accepted ones",
    "mean_acceptance_length": "tokens per speculative step, 1 + accepted / steps, as vLLM defines it; "
    "null without any step",
}
TRACE_COLUMNS = {
    "row_id": "its completion's input row",
    "sample_index": "and which of that row's completions it is",
    "round": "which block of its row, from 1; 0 is the pass over the prompt, of which a draft that works "
    "ahead can have drafted the first token",
    "depth": "tokens of the block before it",
    "position": "place in the completion, from 0",
    "token_id": "the token",
    "entropy": "of the draft there, in nats",
    "draft_probability": "the draft's, of the token; with temperature 0, of the softmax",
    "top_probability": "the draft's, of the likeliest token there",
    "acceptance_probability": "min(1, P/Q) after the tokens before it; null where the row had ended first",
    "is_verified": "all before it were accepted, so that the target verified it; not what a lossy run trusts",
    "is_accepted": "it is a token of the completion",
    "head_probability": "a trained head's estimate; null without one, or where no pass has given it",
}
STATISTICS = {
    "exact": "the completions follow the target's own distribution",
    "replica": "who finished the shard",
    "num_rows": "input rows",
    "num_completions": "completions, those with an error left out",
    "num_error_rows": "input rows with an error",
    "num_cut_completions": "of the completions, those that a length limit has cut (`finish_reason` `length`)",
    "num_prompt_tokens": "tokens of the prompts, once per completion",
    "num_shared_prompt_tokens": "of these, those whose keys and values another row had in the cache already",
    "num_completion_tokens": "tokens of the completions",
    "num_target_passes": "forward passes of the target",
    "num_draft_passes": "forward passes of the draft",
    "num_target_passes_per_size": "the target's passes by the number of tokens that they run, prompts' too",
    "target_pass_ns_per_size": "nanoseconds of these passes, by the same number",
    "num_draft_passes_per_size": "the draft's passes by the number of tokens that they run",
    "num_row_steps": "passes of the target over a row that decide something, each row counted by itself",
    "num_drafts": "of these, those with at least one draft token of the row",
    "num_draft_tokens": "draft tokens that became candidates for the target",
    "num_accepted_tokens": "of these, the accepted ones",
    "num_trusted_tokens": "of these, those that a lossy run committed without the target's judgement",
    "num_head_tokens": "tokens that a trained head has estimated",
    "num_preemptions": "rows that gave their pages of the cache back, to be run again",
    "num_out_of_memory": "rounds that memory did not suffice for, repeated with a smaller batch",
    "num_rounds": "rounds of draft and target",
    "num_messages": "messages between the target's lead and the draft",
    "num_message_bytes": "their bytes",
    "num_target_messages": "messages among the target's ranks",
    "num_target_message_bytes": "their bytes",
    "num_ahead_chains": "with `--overlap ahead`: row-rounds with tokens drafted after the candidates",
    "num_ahead_verified": "of these, those whose candidates were all accepted: the first one was verified",
    "num_ahead_hits": "of these, those whose first token ahead was the target's decision",
    "num_ahead_tokens": "tokens ahead that became no candidates: the first of a hit, all of a lost chain",
    "num_misses": "next tokens that dropped what was drafted after them",
    "num_branches": "branches prepared for misses",
    "num_branch_tokens": "tokens of the branches that were not taken",
    "num_branch_hits_per_rank": "misses that found their branch, by the rank of its first token there",
    "num_accepted_tokens_per_pos": "accepted tokens by their position in the block",
    "draft_length_histogram": "blocks by the number of their draft tokens",
    "accepted_length_histogram": "blocks by the number of their accepted tokens",
    "wall_ns": "wall time of the rounds, in nanoseconds; split by rows where two shards share a round",
    "target_ns.prefill": "of the target's side: passes, the share of them that prompts' tokens have",
    "target_ns.verify": "of the target's side: passes, the share of them that blocks' tokens have",
    "target_ns.transfer": "of the target's side: messages",
    "target_ns.idle": "of the target's side: waiting for the draft",
    "target_ns.host": "of the target's side: everything on the host",
    "draft_ns.prefill": "of the draft's side: passes over prompts",
    "draft_ns.draft": "of the draft's side: drafting",
    "draft_ns.transfer": "of the draft's side: messages",
    "draft_ns.idle": "of the draft's side: waiting for the target",
    "cost_sums.num": "regression of time T on passes, over completions: how many",
    "cost_sums.t": "sum of T, nanoseconds of both models' drafting and verifying while a completion ran",
    "cost_sums.tt": "sum of T²",
    "cost_sums.dd": "sum of D², D being the draft's passes meanwhile",
    "cost_sums.dv": "sum of D V, V being the target's passes meanwhile",
    "cost_sums.vv": "sum of V²",
    "cost_sums.dt": "sum of D T",
    "cost_sums.vt": "sum of V T",
    "shard_cost_sums": "the same eight sums over shards instead of completions",
    "peak_memory_bytes.target": "most bytes held by one rank of the target; merges as a maximum",
    "peak_memory_bytes.draft": "most bytes held by the draft; merges as a maximum",
    "work_span.begin_unix_ns": "when work on the shard began, by the replica's clock; merges as a minimum",
    "work_span.end_unix_ns": "and when it ended, through restarts; merges as a maximum",
}
TOTALS = {
    "output": "folder of the run",
    "exact": "the completions follow the target's own distribution",
    "complete": "all shards are finished",
    "num_rows": "input rows",
    "num_completions": "completions, those with an error left out",
    "num_error_rows": "input rows with an error",
    "num_cut_completions": "of the completions, those that a length limit has cut (`finish_reason` `length`)",
    "num_out_of_memory": "rounds that memory did not suffice for, repeated with a smaller batch",
    "num_completion_tokens": "tokens of the completions",
    "wall_s": "seconds of work, summed over replicas",
    "tokens_per_s": "tokens of the completions per second of a replica's work",
    "tokens_per_s_per_device": "that over the number of ranks of a replica",
    "mean_acceptance_length": "tokens per speculative step, 1 + accepted / steps",
    "draft_acceptance_rate": "accepted of all candidates",
    "num_trusted_tokens": "accepted tokens that a lossy run committed without the target's judgement",
    "discard_rate": "draft tokens that came to nothing, per token of the completions (SpecDec++)",
    "messages_per_round": "messages between the target's lead and the draft",
    "message_bytes_per_round": "their bytes",
    "target_message_bytes_per_pass": "bytes of the messages among the target's ranks, per pass of the target",
    "miss_catch_rate": "of the misses, those that found their branch prepared",
    "ready_rate": "of the target's passes over a row, those that found draft tokens",
    "verification_rate": "target passes over a row per token of its completion (SpecDec++)",
    "target_s": "seconds of the target's side: prefill, verify, transfer, idle, host",
    "draft_s": "seconds of the draft's side: prefill, draft, transfer, idle",
    "costs": "seconds per pass, `measured`, `fitted` to completions and `fitted_over_shards`, with R²",
    "peak_memory_bytes": "most bytes held by one rank, by role",
    "predictions": "what could have been known beside what was measured",
    "operations": "operations and target calls per token, beside how SPRINTER's authors count them",
    "verifier": "a traced verifier's blocks and calls, beside SPRINTER's theorems; empty without one",
}
ARROW_TYPES = {"double": "float64", "float": "float32"}
JSON_TYPES = {int: "int", list[int]: "list of int", dict[int, int]: "object of int"}


@dataclass(frozen=True)
class Field:
    """A column, or a value in a JSON document, by its dotted name."""

    name: str
    type: str
    meaning: str


def output_fields() -> list[Field]:
    """The columns of ``shards/*.arrow``, but for the input's own."""
    return [Field(name, _arrow_type(type_), COLUMNS[name]) for name, type_ in OUTPUT_COLUMNS.items()]


def trace_fields() -> list[Field]:
    """The columns of ``stats/*.trace.arrow``."""
    return [Field(field.name, _arrow_type(field.type), TRACE_COLUMNS[field.name]) for field in TRACE_SCHEMA]


def statistics_fields() -> list[Field]:
    """The values in ``stats/*.json``, those of objects by dotted names."""
    types = {"exact": "bool", "replica": "string", **dict(_types(Stats))}
    return [Field(name, type_, STATISTICS[name]) for name, type_ in types.items()]


def totals_fields() -> list[Field]:
    """The values in the last line that a run prints, which are ``load_run(...).statistics``."""
    types = {"output": "string", "exact": "bool", "complete": "bool"}
    types |= {name: _value_type(value) for name, value in Stats().summary().items()}
    types |= {"predictions": "object", "operations": "object", "verifier": "object"}
    return [Field(name, type_, TOTALS[name]) for name, type_ in types.items()]


SECTIONS = {
    "columns": ("column", output_fields),
    "trace": ("column of the trace", trace_fields),
    "statistics": ("statistic", statistics_fields),
    "totals": ("total", totals_fields),
}


def column_fields(schema: pa.Schema, other_meaning: str) -> list[Field]:
    """The columns of a shard's file, in its order; ``other_meaning`` is that of the input's own."""
    return [
        Field(field.name, _arrow_type(field.type), COLUMNS.get(field.name, other_meaning)) for field in schema
    ]


def markdown_table(section: str) -> str:
    """A section's table, of three columns."""
    heading, fields = SECTIONS[section]
    return fields_table(heading, fields())


def fields_table(heading: str, fields: Iterable[Field]) -> str:
    """A table whose first column is headed by ``heading``."""
    rows = [[code(field.name), plain(field.type), _in_cell(field.meaning)] for field in fields]
    return table([heading, "type", "meaning"], rows)


def _in_cell(text: str) -> str:
    """Prose of this module, with its `code` as it is."""
    return text.replace("|", "\\|")


def _arrow_type(type_: pa.DataType) -> str:
    if pa.types.is_list(type_):
        return f"list<{_arrow_type(type_.value_type)}>"
    return ARROW_TYPES.get(str(type_), str(type_))


def _types(of: Any) -> Iterator[tuple[str, str]]:
    """Dotted names and types of a dataclass's values; one that comes again is not spelled out again."""
    hints, spelled_out = get_type_hints(of), set()
    for item in dataclasses.fields(of):
        hint = hints[item.name]
        if not dataclasses.is_dataclass(hint):
            yield item.name, JSON_TYPES[hint]
        elif hint in spelled_out:
            yield item.name, "object"
        else:
            spelled_out.add(hint)
            yield from ((f"{item.name}.{name}", type_) for name, type_ in _types(hint))


def _value_type(value: Any) -> str:
    """Of a figure of an empty run, in which every ratio is None."""
    if isinstance(value, dict):
        return "object"
    return "float or null" if value is None else type(value).__name__
