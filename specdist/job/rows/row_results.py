"""A shard's results: rows from completions and errors, and what they add to its statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specdist.data.stats.rows import RowResult
from specdist.data.stats.shard import Stats
from specdist.engine.request import Completion
from specdist.job.rows.output_columns import ThinkingColumns


def extend_to_now(stats: Stats) -> None:
    """Extend the span of work on a shard; called when the work begins and when it ends."""
    now_ns = time.time_ns()
    stats.work_span.extend(now_ns, now_ns)


def count_rows(stats: Stats, results: list[RowResult]) -> dict[str, Any]:
    """A shard's statistics for its file. Counts of rows and tokens are taken from the rows themselves, since
    a crash may lose the statistics after the last snapshot, but no row."""
    errors = [result for result in results if result.finish_reason == "error"]
    stats.num_rows = len({result.row_id for result in results})
    stats.num_error_rows = len({result.row_id for result in errors})
    stats.num_completions = len(results) - len(errors)
    stats.num_cut_completions = sum(result.finish_reason == "length" for result in results)
    stats.num_looping_completions = sum(result.finish_reason == "repetition" for result in results)
    stats.num_attempts = sum(result.rollout_attempts or 0 for result in results)
    stats.num_rejected_tokens = sum(result.rollout_rejected_tokens or 0 for result in results)
    stats.num_prompt_tokens = sum(result.num_prompt_tokens for result in results)
    stats.num_completion_tokens = sum(result.num_completion_tokens for result in results)
    return stats.to_json()


def result_of(completion: Completion, thinking: ThinkingColumns | None = None) -> RowResult:
    """The row of the output that a completion becomes."""
    request = completion.request
    if completion.error is not None:
        return error_result(request.row_id, request.sample_index, request.prompt, completion.error)
    return RowResult(
        row_id=request.row_id,
        sample_index=request.sample_index,
        prompt=request.prompt,
        completion=completion.text,
        completion_ids=tuple(completion.token_ids),
        finish_reason=completion.finish_reason,
        num_prompt_tokens=len(request.prompt_ids),
        num_completion_tokens=len(completion.token_ids),
        num_spec_steps=completion.num_spec_steps,
        num_draft_tokens=completion.num_draft_tokens,
        num_accepted_draft_tokens=completion.num_accepted_draft_tokens,
        trace=completion.trace,
        **_logprobs(completion),
        **({} if thinking is None else thinking.of(completion)),
    )


def with_turns(result: RowResult, turns: Sequence[Completion]) -> RowResult:
    """The row of a conversation, given its last result and the turns that were completed."""
    counts: dict[str, Any] = {
        "num_prompt_tokens": sum(len(turn.request.prompt_ids) for turn in turns),
        "num_completion_tokens": sum(len(turn.token_ids) for turn in turns),
        "num_spec_steps": sum(turn.num_spec_steps for turn in turns),
        "num_draft_tokens": sum(turn.num_draft_tokens for turn in turns),
        "num_accepted_draft_tokens": sum(turn.num_accepted_draft_tokens for turn in turns),
    }
    return replace(
        result,
        turn_completions=[turn.text for turn in turns],
        turn_completion_ids=[list(turn.token_ids) for turn in turns],
        turn_finish_reasons=[turn.finish_reason for turn in turns],
        **({} if result.finish_reason == "error" else counts),
    )


def _logprobs(completion: Completion) -> dict[str, Any]:
    """Log-probabilities by column; nothing without them."""
    columns: dict[str, Any] = {}
    if (found := completion.logprobs) is not None:
        columns |= {
            "logprobs": found.raw,
            "processed_logprobs": found.processed,
            "top_logprob_ids": found.top_ids,
            "top_logprobs": found.top_raw,
        }
    if (prompt := completion.prompt_logprobs) is not None:
        columns |= {
            "prompt_ids": completion.request.prompt_ids,
            "prompt_logprobs": prompt.raw,
            "top_prompt_logprob_ids": prompt.top_ids,
            "top_prompt_logprobs": prompt.top_raw,
        }
    return columns


def error_result(row_id: int, sample: int, prompt: str | None, reason: str) -> RowResult:
    """A row with the reason why it has no completion."""
    return RowResult(row_id=row_id, sample_index=sample, prompt=prompt, finish_reason="error", error=reason)
