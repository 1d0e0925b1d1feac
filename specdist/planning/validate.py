"""Predicted against measured: the simulator's tokens per second beside those of the engine, here and now.

Times of single passes are measured as a job measures them at its start. What the engine adds to them (drawing,
scheduling, committing) is taken from a run of one draft token per round, which is not among those predicted.
Acceptance is taken from the run that is predicted: it is a property of the pair, not of the machine.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
import torch

from specdist.benchmark.methods import Generated, Specdist
from specdist.benchmark.paged import PagedPair
from specdist.benchmark.pair import Pair
from specdist.benchmark.timing import timed
from specdist.benchmark.workload import Row
from specdist.costs import CostModel, Curve
from specdist.job.costs import measure_curve
from specdist.planning.events import RowLengths, run_job
from specdist.planning.options import PlanConfig
from specdist.planning.simulate import NS_PER_S, ReplicaCosts, Settings
from specdist.stats import Stats

CALIBRATION_LENGTH = 1
ROWS_PER_SLOT = 2
WARMUP_TOKENS = 4
# The coins of a prediction fall differently with every seed; the run had one throw.
NUM_SEEDS = 8


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One setting: medians of tokens per second; ``acceptance`` is the engine's, None without a draft."""

    num_rows: int
    num_draft_tokens: int
    acceptance: float | None
    measured_tokens_per_s: float
    predicted_tokens_per_s: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_tokens_per_s / self.measured_tokens_per_s - 1


def validate(config: PlanConfig, device: torch.device) -> list[Comparison]:
    """Measure, predict and run the pair: every batch size, without a draft and with each draft length."""
    assert config.draft is not None
    pair = Pair(config.target, config.draft, dtype=config.dtype, device=device)
    batch_sizes = sorted(set(config.batch_sizes or (1, 4)))
    lengths = sorted({0, *(config.draft_lengths or (3, 5))})
    paged = PagedPair(
        pair,
        max_batch_rows=batch_sizes[-1],
        max_seq_len=config.prompt_tokens + config.output_tokens,
        max_draft_tokens=max(lengths[-1], config.prompt_tokens),
        temperature=0.0,
        seed=0,
    )
    return [
        comparison
        for num_rows in batch_sizes
        for comparison in _compare_batch(config, paged, num_rows, lengths)
    ]


def _compare_batch(
    config: PlanConfig, paged: PagedPair, num_rows: int, lengths: list[int]
) -> list[Comparison]:
    generator = np.random.default_rng(num_rows)
    rows = [
        Row(
            generator.integers(paged.pair.vocab_size, size=config.prompt_tokens).tolist(),
            config.output_tokens,
        )
        for _ in range(ROWS_PER_SLOT * num_rows)
    ]
    work = [RowLengths(config.prompt_tokens, config.output_tokens)] * len(rows)
    methods = {
        length: Specdist(paged, batch_size=num_rows, num_draft_tokens=length)
        for length in (CALIBRATION_LENGTH, *lengths)
    }
    warmup = [Row(row.prompt_ids, WARMUP_TOKENS) for row in rows[:num_rows]]
    for method in methods.values():
        method.prepare()
        method.generate(warmup)
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    predicted: dict[int, list[float]] = {length: [] for length in lengths}
    found: dict[int, Generated] = {}
    # In turn, so that a slow minute of the machine hits predictions and runs alike.
    for _ in range(config.repeats):
        costs = _measure(paged, num_rows, lengths[-1], config.prompt_tokens)
        costs = calibrated(costs, _stats(methods[CALIBRATION_LENGTH].generate(rows)))
        for length in lengths:
            elapsed, found[length] = timed(
                paged.pair.device, lambda method=methods[length]: method.generate(rows)
            )
            seconds[length].append(elapsed)
            predicted[length].append(
                statistics.mean(
                    run_job(
                        costs, _settings(num_rows, length, _stats(found[length])), work, seed=seed
                    ).tokens_per_s
                    for seed in range(NUM_SEEDS)
                )
            )
    return [
        Comparison(
            num_rows=num_rows,
            num_draft_tokens=length,
            acceptance=acceptance_rate(_stats(found[length])) if length else None,
            measured_tokens_per_s=found[length].num_tokens / statistics.median(seconds[length]),
            predicted_tokens_per_s=statistics.median(predicted[length]),
        )
        for length in lengths
    ]


def _measure(paged: PagedPair, num_rows: int, longest: int, prompt_tokens: int) -> ReplicaCosts:
    paged.pair.use_specdist_attention()
    per_row = max(longest + 1, prompt_tokens)
    return ReplicaCosts(
        passes=CostModel(
            measure_curve(paged.target, num_rows=num_rows, num_tokens_per_row=per_row),
            # Behind a whole block two tokens of a row are run.
            measure_curve(paged.draft, num_rows=num_rows, num_tokens_per_row=2),
        ),
        draft_prefill=measure_curve(paged.draft, num_rows=num_rows, num_tokens_per_row=prompt_tokens),
        round_s=0.0,
        round_trip_s=0.0,
    )


def calibrated(costs: ReplicaCosts, stats: Stats) -> ReplicaCosts:
    """The costs with what an engine's run of :data:`CALIBRATION_LENGTH` adds to its passes.

    Time that a draft's passes took beyond their curve is added to the curve; all other time of the run is the
    rounds'.
    """
    passes = costs.passes
    mean_rows = stats.num_row_steps / stats.num_target_passes
    drafting_ns = stats.num_draft_passes * float(passes.draft(mean_rows))
    step_ns = max(0, round((stats.draft_ns.draft - drafting_ns) / stats.num_draft_passes))
    mean_tokens = (stats.num_row_steps + stats.num_draft_tokens) / stats.num_target_passes
    verifying_ns = stats.num_target_passes * float(passes.target(mean_tokens))
    spent_ns = stats.wall_ns - stats.draft_ns.draft - stats.draft_ns.prefill - stats.target_ns.prefill
    return ReplicaCosts(
        passes=CostModel(
            passes.target, Curve(passes.draft.sizes, [time_ns + step_ns for time_ns in passes.draft.ns])
        ),
        draft_prefill=costs.draft_prefill,
        round_s=max(0.0, spent_ns - verifying_ns) / stats.num_rounds / NS_PER_S,
        round_trip_s=0.0,
    )


def acceptance_rate(stats: Stats) -> float:
    """Of the candidates that were judged, those accepted: the most likely rate of independent ones.

    Candidates behind a rejected one were not judged. (``draft_acceptance_rate`` counts them.)
    """
    # Of blocks cut short by the end of their row some were whole too; they are few.
    num_whole = _at(stats.accepted_length_histogram, len(stats.draft_length_histogram) - 1)
    return stats.num_accepted_tokens / max(1, stats.num_accepted_tokens + stats.num_drafts - num_whole)


def _at(counts: list[int], index: int) -> int:
    return counts[index] if 0 <= index < len(counts) else 0


def _settings(num_rows: int, length: int, stats: Stats) -> Settings:
    return Settings(
        mode="colocated" if length else "target only",
        num_rows=num_rows,
        num_draft_tokens=length,
        acceptance=acceptance_rate(stats) if length else 0.0,
    )


def _stats(generated: Generated) -> Stats:
    assert generated.stats is not None
    return generated.stats
