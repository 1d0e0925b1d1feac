"""The meaning of all columns, statistics and totals of a run: their only definition.

``jobs/show.py --schema``, the README and the card in every run's folder print it, with the types of what is
written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

import pyarrow as pa

from specdist.data.stats.columns import OUTPUT_COLUMNS, every_column
from specdist.data.stats.shard import Stats
from specdist.data.stats.traces import TRACE_SCHEMA
from specdist.utils.markdown import code, plain, table

COLUMNS = {
    "row_id": "number of the input row, from 0",
    "sample_index": "which of the row's completions, 0 .. `num_samples` - 1",
    "prompt": "the text given to the model, chat template applied; null if the row has no text",
    "completion": "the generated text up to the stop, which is not included; empty if the row has an error",
    "completion_ids": "token ids of the completion, including the stop token",
    "finish_reason": "`stop` (an end token or a stop string), `length` (a length limit was reached) or "
    "`error`",
    "error": "why the row has no completion; null if it has one",
    "num_prompt_tokens": "number of tokens of the prompt; of several turns, of all their prompts",
    "num_completion_tokens": "number of tokens of the completion, the length of `completion_ids`",
    "num_spec_steps": "number of target passes with at least one draft token of this completion",
    "num_draft_tokens": "draft tokens proposed to the target",
    "num_accepted_draft_tokens": "number of these that were accepted",
    "mean_acceptance_length": "tokens per speculative step, 1 + accepted / steps, as vLLM defines it; "
    "null without any step",
    "logprobs": "with `--logprobs`: the target's log-probability of every token of `completion_ids`, of its "
    "own distribution, as a forward pass over the text gives it",
    "processed_logprobs": "with `--logprobs`: the same of the distribution that the token was drawn from, "
    "after penalties, temperature and filters; with temperature 0, after all but these two",
    "top_logprob_ids": "with `--logprobs N`: for every token, the ids of the N likeliest before processing, "
    "likeliest first",
    "top_logprobs": "with `--logprobs N`: their log-probabilities",
    "prompt_ids": "with `--prompt_logprobs`: token ids of the prompt",
    "prompt_logprobs": "with `--prompt_logprobs`: the target's log-probability of every token of "
    "`prompt_ids` after those before it; null for the first",
    "top_prompt_logprob_ids": "with `--prompt_logprobs N`: for every token but the first, the ids of the N "
    "likeliest in its place, likeliest first",
    "top_prompt_logprobs": "with `--prompt_logprobs N`: their log-probabilities",
    "turn_completions": "with `--turns_column`: the generated text of every turn; `completion`, "
    "`completion_ids`, `finish_reason` and `prompt` are then those of the last, and numbers the sums of all",
    "turn_completion_ids": "with `--turns_column`: the token ids of every turn",
    "turn_finish_reasons": "with `--turns_column`: how every turn ended",
    "completion_thinking": "with `--split_thinking` or `--max_thinking_tokens`: the text before the end of "
    "thinking, without the markers; null if the completion has no thinking",
    "completion_answer": "and the text after it; empty if a limit was reached before",
}
TRACE_COLUMNS = {
    "row_id": "input row of the completion",
    "sample_index": "which of the row's completions",
    "round": "number of the completion's block, from 1; 0 is the pass over the prompt, during which a draft "
    "that works ahead may have drafted the first token",
    "depth": "number of tokens before it in the block",
    "position": "position in the completion, from 0",
    "token_id": "id of the token",
    "entropy": "entropy of the draft's distribution, in nats",
    "draft_probability": "the draft's probability of the token; with temperature 0, by its softmax",
    "top_probability": "the draft's probability of its likeliest token",
    "acceptance_probability": "min(1, P/Q) given the tokens before it; null if the row ended before it",
    "is_verified": "all tokens before it were accepted, so the target's verification of it counted; false "
    "for tokens that a lossy run accepts unverified",
    "is_accepted": "it became a token of the completion",
    "head_probability": "a trained head's estimate; null without a head, or if no pass computed it",
}
STATISTICS = {
    "exact": "the completions follow the target's own distribution",
    "replica": "the replica that finished the shard",
    "num_rows": "input rows",
    "num_completions": "completions, without those that have an error",
    "num_error_rows": "input rows with an error",
    "num_cut_completions": "completions that were cut by a length limit (`finish_reason` `length`)",
    "num_prompt_tokens": "tokens of the prompts, once per completion",
    "num_shared_prompt_tokens": "of these, those whose keys and values were in the cache already, from "
    "another row",
    "num_completion_tokens": "tokens of the completions",
    "num_target_passes": "forward passes of the target",
    "num_draft_passes": "forward passes of the draft",
    "num_target_passes_per_size": "target passes by their number of tokens, prompt tokens included",
    "target_pass_ns_per_size": "total nanoseconds of these passes, by the same number",
    "num_draft_passes_per_size": "draft passes by their number of tokens",
    "num_draft_row_steps": "draft passes, counted per sequence and branch",
    "num_empty_draft_steps": "of these, those that drafted no token",
    "num_row_steps": "target passes that determined a next token, counted per sequence",
    "num_drafts": "of these, those that verified at least one draft token of the sequence",
    "num_draft_tokens": "draft tokens proposed to the target",
    "num_accepted_tokens": "of these, the accepted ones",
    "num_trusted_tokens": "of these, those that a lossy run committed unverified",
    "num_head_tokens": "tokens for which a trained head gave an estimate",
    "num_forced_draft_tokens": "draft tokens that the constraint of a row forces, drafted without a pass",
    "num_preemptions": "times that a sequence gave back its cache pages, to be computed again later",
    "num_out_of_memory": "rounds that ran out of memory and were repeated with a smaller batch",
    "num_starts": "replicas whose first token belongs to the shard",
    "first_token_ns": "nanoseconds from the start of these replicas' processes to that token",
    "num_weight_bytes": "bytes of the models' files that all ranks of these replicas read while loading",
    "num_rounds": "rounds (draft, verify, commit)",
    "num_messages": "messages between the target's rank 0 and the draft",
    "num_message_bytes": "total bytes of these messages",
    "num_state_bytes": "bytes of the target's hidden states that an EAGLE-3 draft was given: of every "
    "committed token, those of three layers",
    "num_target_messages": "messages between the target's ranks",
    "num_target_message_bytes": "total bytes of these messages",
    "num_ahead_chains": "with `--overlap ahead`: chains of tokens drafted after the candidates, one per "
    "row and round",
    "num_ahead_verified": "of these, those whose first token was verified, since all candidates were "
    "accepted",
    "num_ahead_hits": "of these, those whose first token was the next token of the target",
    "num_ahead_tokens": "tokens drafted ahead that did not become candidates: the first of an accepted "
    "chain, all of a lost one",
    "num_misses": "next tokens that invalidated what was drafted after them",
    "num_branches": "branches prepared for misses",
    "num_branch_tokens": "tokens of the branches that were not used",
    "num_branch_hits_per_rank": "misses caught by a branch, by the rank of its first token among the "
    "alternatives",
    "num_accepted_tokens_per_pos": "accepted tokens by their position in the block",
    "draft_length_histogram": "blocks by number of draft tokens",
    "accepted_length_histogram": "blocks by number of accepted tokens",
    "wall_ns": "wall time of the rounds, in nanoseconds; split by rows where two shards share a round",
    "target_ns.prefill": "target side: passes, the share of prompt tokens",
    "target_ns.verify": "target side: passes, the share of verified blocks",
    "target_ns.transfer": "target side: messages",
    "target_ns.idle": "target side: waiting for the draft",
    "target_ns.host": "target side: scheduling and other work on the host",
    "draft_ns.prefill": "draft side: passes over prompts",
    "draft_ns.draft": "draft side: drafting",
    "draft_ns.transfer": "draft side: messages",
    "draft_ns.idle": "draft side: waiting for the target",
    "cost_sums.num": "regression of time T on the numbers of passes, over completions: number of completions",
    "cost_sums.t": "sum of T, the nanoseconds of drafting and verification while a completion was running",
    "cost_sums.tt": "sum of T²",
    "cost_sums.dd": "sum of D², D being the draft passes in that time",
    "cost_sums.dv": "sum of D V, V being the target passes in that time",
    "cost_sums.vv": "sum of V²",
    "cost_sums.dt": "sum of D T",
    "cost_sums.vt": "sum of V T",
    "shard_cost_sums": "the same eight sums over shards instead of completions",
    "peak_memory_bytes.target": "peak bytes on one rank of the target; merges as a maximum",
    "peak_memory_bytes.draft": "peak bytes on the draft's rank; merges as a maximum",
    "work_span.begin_unix_ns": "start of the work on the shard, by the replica's clock; merges as a minimum",
    "work_span.end_unix_ns": "end of the work on the shard, across restarts; merges as a maximum",
}
TOTALS = {
    "output": "the run folder",
    "exact": STATISTICS["exact"],
    "complete": "all shards are finished",
    "num_rows": STATISTICS["num_rows"],
    "num_completions": STATISTICS["num_completions"],
    "num_error_rows": STATISTICS["num_error_rows"],
    "num_cut_completions": STATISTICS["num_cut_completions"],
    "num_out_of_memory": STATISTICS["num_out_of_memory"],
    "num_completion_tokens": STATISTICS["num_completion_tokens"],
    "wall_s": "seconds of work, summed over replicas",
    "tokens_per_s": "completion tokens per second of one replica's work",
    "time_to_first_token_s": "seconds from the start of a replica's process to its first token, on average",
    "tokens_per_s_per_device": "the same, divided by the number of ranks of a replica",
    "mean_acceptance_length": "tokens per speculative step, 1 + accepted / steps",
    "draft_acceptance_rate": "share of the proposed draft tokens that were accepted",
    "num_trusted_tokens": "accepted tokens that a lossy run committed unverified",
    "discard_rate": "discarded draft tokens, and draft passes of a sequence without a token, per completion "
    "token (SpecDec++)",
    "messages_per_round": "messages between the target's rank 0 and the draft, per round",
    "message_bytes_per_round": "bytes of these messages, per round",
    "state_bytes_per_round": "bytes of hidden states per round, of an EAGLE-3 draft",
    "target_message_bytes_per_pass": "bytes of messages between the target's ranks, per target pass",
    "miss_catch_rate": "share of the misses that were caught by a branch",
    "ready_rate": "share of a sequence's target passes that had draft tokens",
    "verification_rate": "target passes of a sequence per completion token (SpecDec++)",
    "target_s": "seconds of the target side: prefill, verify, transfer, idle, host",
    "draft_s": "seconds of the draft side: prefill, draft, transfer, idle",
    "costs": "seconds per pass, `measured`, `fitted` to completions and `fitted_over_shards`, with R²",
    "peak_memory_bytes": "peak bytes on one rank, by role",
    "predictions": "predictions of the theory and of the measured costs, next to the measurements",
    "operations": "operations and target calls per token, next to the counts of SPRINTER's authors",
    "verifier": "blocks and calls of a traced verifier, next to SPRINTER's theorems; empty without one",
}
ARROW_TYPES = {"double": "float64", "float": "float32"}
JSON_TYPES = {int: "int", list[int]: "list of int", dict[int, int]: "object of int"}


@dataclass(frozen=True)
class Field:
    """A column, or a value in a JSON document by its dotted name."""

    name: str
    type: str
    meaning: str


def output_fields() -> list[Field]:
    """The columns of ``shards/*.arrow``, without those of the input."""
    return [Field(name, _arrow_type(type_), COLUMNS[name]) for name, type_ in OUTPUT_COLUMNS.items()]


def optional_fields() -> list[Field]:
    """Those of runs with some options, after them."""
    return [
        Field(name, _arrow_type(type_), COLUMNS[name])
        for name, type_ in every_column().items()
        if name not in OUTPUT_COLUMNS
    ]


def trace_fields() -> list[Field]:
    """The columns of ``stats/*.trace.arrow``."""
    return [Field(field.name, _arrow_type(field.type), TRACE_COLUMNS[field.name]) for field in TRACE_SCHEMA]


def statistics_fields() -> list[Field]:
    """The values in ``stats/*.json``."""
    types = {"exact": "bool", "replica": "string", **dict(_types(Stats))}
    return [Field(name, type_, STATISTICS[name]) for name, type_ in types.items()]


def totals_fields() -> list[Field]:
    """The values in the last line that a run prints, which are ``load_run(...).statistics``."""
    types = {"output": "string", "exact": "bool", "complete": "bool"}
    types |= {name: _value_type(value) for name, value in Stats().summary().items()}
    types |= {"predictions": "object", "operations": "object", "verifier": "object"}
    return [Field(name, type_, TOTALS[name]) for name, type_ in types.items()]


SECTIONS = {
    "columns": ("column", lambda: [*output_fields(), *optional_fields()]),
    "trace": ("column of the trace", trace_fields),
    "statistics": ("statistic", statistics_fields),
    "totals": ("total", totals_fields),
}


def column_fields(schema: pa.Schema, other_meaning: str) -> list[Field]:
    """The columns of a shard's file, in order; ``other_meaning`` describes those of the input."""
    return [
        Field(field.name, _arrow_type(field.type), COLUMNS.get(field.name, other_meaning)) for field in schema
    ]


def markdown_table(section: str) -> str:
    """The Markdown table of a section."""
    heading, fields = SECTIONS[section]
    return fields_table(heading, fields())


def fields_table(heading: str, fields: Iterable[Field]) -> str:
    """A Markdown table with ``heading`` over its first column."""
    rows = [[code(field.name), plain(field.type), field.meaning.replace("|", "\\|")] for field in fields]
    return table([heading, "type", "meaning"], rows)


def _arrow_type(type_: pa.DataType) -> str:
    if pa.types.is_list(type_):
        return f"list<{_arrow_type(type_.value_type)}>"
    return ARROW_TYPES.get(str(type_), str(type_))


def _types(of: Any) -> Iterator[tuple[str, str]]:
    """Dotted names and types of a dataclass's values; the fields of nested types are listed once."""
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
    """The type of a figure, by its value in an empty run, where every ratio is None."""
    if isinstance(value, dict):
        return "object"
    return "float or null" if value is None else type(value).__name__
