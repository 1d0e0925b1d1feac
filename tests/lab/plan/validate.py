"""Validation of the planner: predicted tokens per second beside those of the engine on this machine.

    python -m tests.lab.plan.validate --target runs/pair/target --draft runs/pair/draft --prompt_tokens 16

Pass times are measured as a job measures them at its start. What the engine adds to them (drawing,
scheduling, committing) is calibrated by runs of prompts of their own, which are not predicted: of the target
alone, and with 1 and with 4 draft tokens per round. The acceptance rate and the length of every completion
are those of the predicted run: they are properties of the pair and of the text, not of the machine.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from specdist.cli import Command
from specdist.config.arguments import option
from specdist.config.groups import TrustOptions, values_of
from specdist.data.stats.shard import NS_PER_S, Stats
from specdist.engine.times.timeline import timed
from specdist.job.ranks.topology import local_device
from specdist.lab.plan.simulate import ReplicaCosts, Settings
from specdist.policies.costs import CostModel, Curve
from specdist.policies.formulas import tokens_per_call
from specdist.utils.errors import UserError
from specdist.utils.rules import check_ranges
from specdist.utils.table import Table, decimals
from tests.lab.curves import draft_curve, target_curve
from tests.lab.plan.events import RowLengths, run_job
from tests.lab.plan.measured import Generated, MeasuredPair, Row

# Draft lengths of the runs by which the engine's overhead is calibrated.
CALIBRATION_LENGTHS = (1, 4)
WITHIN = 0.15
ROWS_PER_SLOT = 2
WARMUP_TOKENS = 4
# Predictions are averaged over seeds of the random acceptance.
NUM_SEEDS = 8
# Of an interval from 0 to 1: precise to a millionth.
NUM_HALVINGS = 20

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ValidationConfig(TrustOptions):
    """Every option. Raises :class:`UserError` for a value out of its range."""

    _argument_group_name = "Validation"

    target: str = option(help="folder of the large model")
    draft: str = option(help="folder of the small model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", help="auto = the checkpoint's")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="device to run on")
    prompt_tokens: int = option(512, help="tokens per prompt", at_least=1)
    output_tokens: int = option(256, help="tokens per completion", at_least=1)
    batch_sizes: list[int] | None = option(None, help="batch sizes (1 4)", action="extend", at_least=1)
    draft_lengths: list[int] | None = option(
        None, help="draft tokens per round (3 5)", action="extend", at_least=1
    )
    repeats: int = option(5, help="runs of each setting; the fastest is used", at_least=1)

    def __post_init__(self) -> None:
        self.batch_sizes = self.batch_sizes or [1, 4]
        self.draft_lengths = self.draft_lengths or [3, 5]
        check_ranges(self)
        known = set(CALIBRATION_LENGTHS).intersection(self.draft_lengths)
        if known:
            raise UserError(
                f"--draft_lengths {min(known)} is used for calibration, so predicting it proves nothing: "
                "choose other lengths"
            )


@dataclass(frozen=True, kw_only=True)
class Validation:
    """One setting: tokens per second of every repeat, and as predicted; ``acceptance`` is the engine's, or
    None."""

    num_rows: int
    num_draft_tokens: int
    acceptance: float | None
    measured_tokens_per_s: list[float]
    predicted_tokens_per_s: float

    @property
    def errors(self) -> list[float]:
        """Relative error of the prediction against each repeat."""
        return [self.predicted_tokens_per_s / measured - 1 for measured in self.measured_tokens_per_s]

    @property
    def error(self) -> float:
        """Against the fastest repeat, which other programs have disturbed least."""
        return self.predicted_tokens_per_s / max(self.measured_tokens_per_s) - 1


def validate(config: ValidationConfig) -> list[Validation]:
    """Predict and run every batch size, without a draft and with each draft length."""
    assert config.batch_sizes and config.draft_lengths
    device = local_device(config.device)
    batch_sizes, lengths = sorted(set(config.batch_sizes)), sorted({0, *config.draft_lengths})
    pair = MeasuredPair(
        config.target,
        config.draft,
        device=device,
        dtype=config.dtype,
        max_num_seqs=batch_sizes[-1],
        max_seq_len=config.prompt_tokens + config.output_tokens,
        max_draft_tokens=max(lengths[-1], config.prompt_tokens),
        **values_of(config, TrustOptions),
    )
    return [
        comparison
        for num_rows in batch_sizes
        for comparison in _compare_batch(config, pair, num_rows, lengths)
    ]


def _compare_batch(
    config: ValidationConfig, pair: MeasuredPair, num_rows: int, lengths: list[int]
) -> list[Validation]:
    generator = np.random.default_rng(num_rows)
    known, rows = (
        [
            Row(
                generator.integers(pair.vocab_size, size=config.prompt_tokens).tolist(),
                config.output_tokens,
            )
            for _ in range(ROWS_PER_SLOT * num_rows)
        ]
        for _ in range(2)
    )
    methods = {
        length: partial(pair.generate, num_slots=num_rows, num_draft_tokens=length)
        for length in sorted({0, *CALIBRATION_LENGTHS, *lengths})
    }
    warmup = [Row(row.prompt_ids, WARMUP_TOKENS) for row in rows[:num_rows]]
    for generate in methods.values():
        generate(warmup)
    # Of all that is measured the fastest repeat counts, which other programs have disturbed least.
    curves: list[ReplicaCosts] = []
    calibrating: dict[int, list[tuple[float, Generated]]]
    calibrating = {length: [] for length in (0, *CALIBRATION_LENGTHS)}
    runs: dict[int, list[tuple[float, Generated]]] = {length: [] for length in lengths}
    for repeat in range(config.repeats):
        curves.append(_measure(pair, num_rows, lengths[-1], config.prompt_tokens))
        for prompts, kept in ((known, calibrating), (rows, runs)):
            for length, times in kept.items():
                times.append(timed(pair.device, partial(methods[length], prompts)))
        logger.info("batch %d: repeat %d of %d", num_rows, repeat + 1, config.repeats)
    plain, *drafting = (min(times, key=itemgetter(0))[1].stats for times in calibrating.values())
    costs = calibrated(fastest_costs(curves), plain, drafting)
    return [_validation(costs, num_rows, length, config.prompt_tokens, runs[length]) for length in lengths]


def _validation(
    costs: ReplicaCosts, num_rows: int, length: int, prompt_tokens: int, runs: list[tuple[float, Generated]]
) -> Validation:
    found = runs[-1][1]
    # Properties of the pair and the texts: where they end, and how well each of them is drafted.
    work = [
        RowLengths(prompt_tokens, len(completion), row_acceptance(num_accepted, num_blocks, length))
        for completion, (num_blocks, num_accepted) in zip(found.completions, found.accepted, strict=True)
    ]
    settings = _settings(num_rows, length, found.stats)
    outcomes = [run_job(costs, settings, work, seed=seed) for seed in range(NUM_SEEDS)]
    return Validation(
        num_rows=num_rows,
        num_draft_tokens=length,
        acceptance=settings.acceptance if length else None,
        measured_tokens_per_s=[generated.num_tokens / seconds for seconds, generated in runs],
        predicted_tokens_per_s=statistics.mean(outcome.tokens_per_s for outcome in outcomes),
    )


def fastest_costs(found: Sequence[ReplicaCosts]) -> ReplicaCosts:
    """Of several measurements at the same sizes, the fastest at each size."""
    return ReplicaCosts(
        passes=CostModel(
            _fastest_curve([costs.passes.target for costs in found]),
            _fastest_curve([costs.passes.draft for costs in found]),
        ),
        draft_prefill=_fastest_curve([costs.draft_prefill for costs in found]),
        round_s=0.0,
        proposal_s=0.0,
    )


def _fastest_curve(curves: Sequence[Curve]) -> Curve:
    return Curve(curves[0].sizes, [min(times) for times in zip(*(curve.ns for curve in curves), strict=True)])


def _measure(pair: MeasuredPair, num_rows: int, longest: int, prompt_tokens: int) -> ReplicaCosts:
    settings, vocab_size = pair.settings, pair.vocab_size

    def draft(num_tokens_per_row: int) -> Curve:
        return draft_curve(
            pair.draft,
            settings,
            vocab_size,
            uses_features=False,
            num_rows=num_rows,
            num_tokens_per_row=num_tokens_per_row,
        )

    per_row = max(longest + 1, prompt_tokens)
    target = target_curve(pair.target, settings, vocab_size, num_rows=num_rows, num_tokens_per_row=per_row)
    return ReplicaCosts(
        # After a block that was accepted whole, two tokens of a row are run.
        passes=CostModel(target, draft(2)),
        draft_prefill=draft(prompt_tokens),
        round_s=0.0,
        proposal_s=0.0,
    )


def calibrated(costs: ReplicaCosts, plain: Stats, drafting: Sequence[Stats]) -> ReplicaCosts:
    """The costs with the engine's overhead: that of every round from a run of the target alone, and what a
    proposal adds to it from two runs of different draft lengths: a part per round, and a part per step.

    A proposal's part is also the target's: it accepts candidates and records what became of them.
    """
    passes = costs.passes
    round_ns = max(0.0, _beside_passes_ns(passes, plain))
    proposals_ns = [_beside_passes_ns(passes, stats) - round_ns for stats in drafting]
    steps = [stats.num_draft_passes / stats.num_rounds for stats in drafting]
    step_ns = max(0.0, (proposals_ns[1] - proposals_ns[0]) / (steps[1] - steps[0]))
    draft = Curve(passes.draft.sizes, [round(time_ns + step_ns) for time_ns in passes.draft.ns])
    return ReplicaCosts(
        passes=CostModel(passes.target, draft),
        draft_prefill=costs.draft_prefill,
        round_s=round_ns / NS_PER_S,
        proposal_s=max(0.0, statistics.mean(proposals_ns) - statistics.mean(steps) * step_ns) / NS_PER_S,
    )


def _beside_passes_ns(passes: CostModel, stats: Stats) -> float:
    """Nanoseconds of a round beside its passes; prompts are left out."""
    mean_rows = stats.num_row_steps / stats.num_target_passes
    mean_tokens = (stats.num_row_steps + stats.num_draft_tokens) / stats.num_target_passes
    passes_ns = stats.num_target_passes * float(passes.target(mean_tokens))
    passes_ns += stats.num_draft_passes * float(passes.draft(mean_rows))
    target = stats.target_ns
    spent_ns = target.verify + target.host + target.idle + target.transfer - stats.draft_ns.prefill
    return (spent_ns - passes_ns) / stats.num_rounds


def acceptance_rate(stats: Stats) -> float:
    """The share of verified candidates that were accepted: the most likely rate of independent ones.

    Candidates after a rejected one were not verified (``draft_acceptance_rate`` counts them).
    """
    # The few whole blocks that the end of their row cut short are left out.
    num_whole = sum(stats.accepted_length_histogram[len(stats.draft_length_histogram) - 1 :])
    return stats.num_accepted_tokens / max(1, stats.num_accepted_tokens + stats.num_drafts - num_whole)


def row_acceptance(num_accepted: int, num_blocks: int, length: int) -> float | None:
    """The acceptance rate with which so many tokens are accepted in blocks of this length; None without any:
    that for which so many are expected (Leviathan et al. 2023, Eq. 1)."""
    if not num_blocks or not length:
        return None
    lowest, highest = 0.0, 1.0
    for _ in range(NUM_HALVINGS):
        middle = (lowest + highest) / 2
        if tokens_per_call(middle, length) < 1 + num_accepted / num_blocks:
            lowest = middle
        else:
            highest = middle
    return highest


def _settings(num_rows: int, length: int, stats: Stats) -> Settings:
    return Settings(
        mode="colocated" if length else "target only",
        num_rows=num_rows,
        num_draft_tokens=length,
        acceptance=acceptance_rate(stats) if length else 0.0,
    )


def compare(config: ValidationConfig) -> tuple[str, dict[str, Any]]:
    """The text and the document to print. Raises :class:`UserError`."""
    found = validate(config)
    num_close = sum(abs(one.error) <= WITHIN for one in found)
    text = f"{validation_table(found)}\n{num_close} of {len(found)} within {WITHIN:.0%}"
    return text, {"comparisons": [{**dataclasses.asdict(one), "error": one.error} for one in found]}


def validation_table(validations: Sequence[Validation]) -> str:
    """Predicted and measured tokens per second, one row per setting."""
    rows = [
        {
            "batch": found.num_rows,
            "K": found.num_draft_tokens,
            "acceptance": decimals(found.acceptance),
            "measured tokens/s": f"{max(found.measured_tokens_per_s):.1f}",
            "predicted tokens/s": f"{found.predicted_tokens_per_s:.1f}",
            "error": f"{found.error:+.1%}",
            "of the repeats": f"{min(found.errors):+.0%} .. {max(found.errors):+.0%}",
        }
        for found in validations
    ]
    return Table.of(rows, num_names=2).console()


main = Command(
    "validate", "compare the planner with runs",
    "tests.lab.plan.validate:ValidationConfig", "tests.lab.plan.validate:compare", logs=True,
)  # fmt: skip

if __name__ == "__main__":
    main.end()
