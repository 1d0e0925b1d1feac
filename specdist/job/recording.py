"""From completions to finished shards: part logs as rows finish, one Arrow file when all of a shard have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specdist.data import PartLog, RowError, RowResult, shard_table, trace_table
from specdist.engine.ledger import Ledger
from specdist.engine.sequence import Completion, Request
from specdist.job.preflight import RunPlan
from specdist.job.progress import Progress
from specdist.job.tokens import PromptEncoder
from specdist.stats import Stats

SNAPSHOT_INTERVAL_S = 1.0


@dataclass
class _OpenShard:
    log: PartLog
    num_expected: int
    snapshot_at: float = 0.0


class Recorder:
    """Feeds the engine with requests and writes down what comes back; resumes what an earlier run left."""

    def __init__(
        self,
        plan: RunPlan,
        encoder: PromptEncoder,
        ledger: Ledger,
        *,
        num_samples: int,
        progress: Progress,
        is_traced: bool = False,
        is_exact: bool = True,
    ) -> None:
        self._plan = plan
        self._encoder = encoder
        self._ledger = ledger
        self._num_samples = num_samples
        self._progress = progress
        self._is_traced = is_traced
        self._is_exact = is_exact
        self._open: dict[int, _OpenShard] = {}
        self._texts: dict[int, str] = {}

    def requests(self) -> Iterator[Request]:
        """One request for every completion that no earlier run has finished, in input order."""
        for shard in self._plan.pending_shards:
            first, end = self._plan.shards.bounds(shard)
            log = self._plan.folder.parts(shard)
            self._open[shard] = _OpenShard(log, (end - first) * self._num_samples)
            if log.stats is not None:
                self._ledger.shard(shard).add(Stats.from_json(log.stats))
            for result in log.results.values():
                self._progress.skip(result)
            for row_id in range(first, end):
                samples = [
                    sample for sample in range(self._num_samples) if (row_id, sample) not in log.results
                ]
                if samples:
                    yield from self._row_requests(shard, row_id, samples)
            # Every row may have been finished before, or refused.
            self._finish_if_complete(shard)

    def record(self, completion: Completion) -> None:
        """Write down a finished completion; it survives the end of this process from here on."""
        request = completion.request
        self._record(
            request.shard,
            RowResult(
                row_id=request.row_id,
                sample_index=request.sample_index,
                prompt=self._texts[request.row_id],
                completion=completion.text,
                completion_ids=tuple(completion.token_ids),
                finish_reason=completion.finish_reason,
                error=None,
                num_prompt_tokens=len(request.prompt_ids),
                num_completion_tokens=len(completion.token_ids),
                num_spec_steps=completion.num_spec_steps,
                num_draft_tokens=completion.num_draft_tokens,
                num_accepted_draft_tokens=completion.num_accepted_draft_tokens,
                trace=completion.trace,
            ),
        )
        self._finish_if_complete(request.shard)

    def _row_requests(self, shard: int, row_id: int, samples: list[int]) -> Iterator[Request]:
        text: str | None = None
        try:
            prompt = self._plan.prompts.prompt(row_id)
            text = self._encoder.text(prompt)
            prompt_ids = self._encoder.token_ids(text, is_chat=not isinstance(prompt, str))
        except RowError as error:
            for sample in samples:
                self._record(shard, _error_result(row_id, sample, text, error.reason))
            return
        self._texts[row_id] = text
        for sample in samples:
            yield Request(row_id=row_id, sample_index=sample, prompt_ids=prompt_ids, shard=shard)

    def _record(self, shard: int, result: RowResult) -> None:
        open_shard = self._open[shard]
        open_shard.log.append(result)
        now = time.monotonic()
        if now - open_shard.snapshot_at >= SNAPSHOT_INTERVAL_S:
            open_shard.log.snapshot(self._ledger.shard(shard).to_json())
            open_shard.snapshot_at = now
        self._progress.add(result)

    def _finish_if_complete(self, shard: int) -> None:
        open_shard = self._open.get(shard)
        if open_shard is None or len(open_shard.log.results) < open_shard.num_expected:
            return
        del self._open[shard]
        first, end = self._plan.shards.bounds(shard)
        results = list(open_shard.log.results.values())
        table = shard_table(
            self._plan.prompts.table(first, end),
            results,
            first_row=first,
            num_samples=self._num_samples,
            is_exact=self._is_exact,
        )
        stats = {
            "exact": self._is_exact,
            **count_rows(self._ledger.close_shard(shard), results),
        }
        open_shard.log.close()
        trace = None
        if self._is_traced:
            trace = trace_table((result.row_id, result.sample_index, result.trace) for result in results)
        self._plan.folder.finish_shard(shard, table, stats, trace)
        for row_id in range(first, end):
            self._texts.pop(row_id, None)


def count_rows(stats: Stats, results: list[RowResult]) -> dict[str, Any]:
    """A shard's statistics for its file. What rows say themselves is counted from them: a crash between a row
    and the statistics' next snapshot loses time that was spent, but no row."""
    errors = [result for result in results if result.finish_reason == "error"]
    stats.num_rows = len({result.row_id for result in results})
    stats.num_error_rows = len({result.row_id for result in errors})
    stats.num_completions = len(results) - len(errors)
    stats.num_prompt_tokens = sum(result.num_prompt_tokens for result in results)
    stats.num_completion_tokens = sum(result.num_completion_tokens for result in results)
    stats.close_shard()
    return stats.to_json()


def _error_result(row_id: int, sample: int, prompt: str | None, reason: str) -> RowResult:
    return RowResult(
        row_id=row_id,
        sample_index=sample,
        prompt=prompt,
        completion="",
        completion_ids=(),
        finish_reason="error",
        error=reason,
        num_prompt_tokens=0,
        num_completion_tokens=0,
        num_spec_steps=0,
        num_draft_tokens=0,
        num_accepted_draft_tokens=0,
    )
