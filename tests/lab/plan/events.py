"""A job round by round: the same costs as in :mod:`specdist.lab.plan.simulate`, with its start and its
end.

It mirrors the scheduler and the draft without any model: rows have lengths of their own, a row that ends
makes room for the next, prompts join passes in chunks, and candidates are accepted at random.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdist.data.stats.regression import NS_PER_S
from specdist.lab.plan.simulate import PREFILL_CHUNK_TOKENS, ReplicaCosts, Settings


@dataclass(frozen=True)
class RowLengths:
    """Tokens of one row's prompt and of its completion. ``acceptance``: its own, where it is known."""

    prompt_tokens: int
    output_tokens: int
    acceptance: float | None = None


@dataclass(eq=False)
class _Row:
    """``num_left``: tokens still to come after the known next token. ``is_ready``: candidates are prepared.
    ``lags``: its whole block was accepted, and the draft has not run the last candidate."""

    lengths: RowLengths
    num_prefilled: int = 0
    num_left: int = 0
    is_ready: bool = False
    lags: bool = False

    @property
    def num_context_left(self) -> int:
        return self.lengths.prompt_tokens - self.num_prefilled


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """Wall time of a job in seconds, and its tokens and rounds."""

    seconds: float
    num_tokens: int
    num_rounds: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_job(
    costs: ReplicaCosts,
    settings: Settings,
    rows: Sequence[RowLengths],
    *,
    seed: int = 0,
    max_num_batched_tokens: int = PREFILL_CHUNK_TOKENS,
) -> JobOutcome:
    """Simulate all rows, in order; every prompt has at least one token."""
    coins = np.random.default_rng(seed)
    waiting, running = deque(map(_Row, rows)), list[_Row]()
    seconds, num_rounds = 0.0, 0
    while waiting or running:
        decoding = [row for row in running if not row.num_context_left]
        candidates = [_num_candidates(settings, row) for row in decoding]
        budget = max_num_batched_tokens - len(decoding) * (settings.num_draft_tokens + 1)
        num_chunk_tokens = 0
        while budget > num_chunk_tokens:
            row = next((row for row in running if row.num_context_left), None)
            if row is None:
                if not waiting or len(running) == settings.num_rows:
                    break
                row = waiting.popleft()
                running.append(row)
            taken = min(row.num_context_left, budget - num_chunk_tokens)
            row.num_prefilled += taken
            num_chunk_tokens += taken
            if not row.num_context_left:
                row.num_left = row.lengths.output_tokens - 1
                is_hit = coins.random() < _acceptance(settings, row)
                row.is_ready = _is_prepared(settings, coins, is_hit=is_hit)
        seconds += _round_s(costs, settings, decoding, candidates, num_chunk_tokens)
        num_rounds += 1
        for row, count in zip(decoding, candidates, strict=True):
            _verify(settings, coins, row, count)
        running = [row for row in running if row.num_context_left or row.num_left > 0]
    num_tokens = sum(row.output_tokens for row in rows)
    return JobOutcome(seconds=seconds, num_tokens=num_tokens, num_rounds=num_rounds)


def _num_candidates(settings: Settings, row: _Row) -> int:
    """At most one less than the tokens left: a pass yields one token after the candidates."""
    if settings.mode == "target only" or (settings.is_asynchronous and not row.is_ready):
        return 0
    return max(0, min(settings.num_draft_tokens, row.num_left - 1))


def _verify(settings: Settings, coins: np.random.Generator, row: _Row, num_candidates: int) -> None:
    flips = coins.random(num_candidates + 1) < _acceptance(settings, row)
    misses = np.flatnonzero(~flips)
    num_accepted = int(misses[0]) if len(misses) else num_candidates + 1
    row.lags = num_accepted >= num_candidates > 0
    # The flip after the candidates decides on the first token ahead, which may become the next token.
    row.is_ready = _is_prepared(settings, coins, is_hit=num_accepted > num_candidates)
    row.num_left -= min(num_accepted, num_candidates) + 1


def _acceptance(settings: Settings, row: _Row) -> float:
    own = row.lengths.acceptance
    return settings.acceptance if own is None else own


def _is_prepared(settings: Settings, coins: np.random.Generator, *, is_hit: bool) -> bool:
    return settings.is_asynchronous and bool(is_hit or coins.random() < settings.caught_share)


def _round_s(
    costs: ReplicaCosts,
    settings: Settings,
    decoding: Sequence[_Row],
    candidates: Sequence[int],
    num_chunk_tokens: int,
) -> float:
    passes = costs.passes
    target_ns = float(passes.target(sum(candidates) + len(decoding) + num_chunk_tokens))
    if settings.mode == "target only":
        return costs.round_s + target_ns / NS_PER_S
    draft_ns = float(costs.draft_prefill(num_chunk_tokens))
    if settings.is_asynchronous:
        draft_rows = len(decoding) * (1 + settings.num_branches)
        draft_ns += float(passes.draft(len(decoding)) + settings.num_draft_tokens * passes.draft(draft_rows))
        return costs.round_s + costs.proposal_s + max(target_ns, draft_ns) / NS_PER_S
    for depth in range(max(candidates, default=0)):
        active = [row for row, count in zip(decoding, candidates, strict=True) if count > depth]
        draft_ns += float(passes.draft(len(active) + (0 if depth else sum(row.lags for row in active))))
    return costs.round_s + costs.proposal_s + (target_ns + draft_ns) / NS_PER_S
