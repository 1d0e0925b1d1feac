"""The result of an emulation, as JSON and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdist.lab.plan.simulate import Mode
from specdist.utils.table import Table, decimals
from tests.lab.emulation.config import TARGET_ONLY
from tests.lab.emulation.session import Run

# More slow passes than this make a result one of this machine, not of the emulated GPU.
FEW_SLOW = 0.01


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a real clock shows of one case's steady rounds.

    Attributes:
        exposed_share: of the rounds' time; ``exposed_in_repeats``: of all measurements, if there were
            several, of which this one is the median.
        ideal_tokens_per_s: the same tokens in the time that the rounds' passes need by the planner, without
            any host: see :mod:`tests.lab.emulation.accounting`.
        round_ms: mean length of a round.
        slow_share: passes for which this machine took longer than the emulated GPU.
    """

    exposed_share: float
    ideal_tokens_per_s: float
    round_ms: float
    slow_share: float
    exposed_in_repeats: Sequence[float] = ()

    @staticmethod
    def of(run: Run) -> Measured:
        times = run.times
        logs = [log for log in (run.target, run.draft) if log is not None]
        share = times.exposed_share
        return Measured(
            exposed_share=share,
            ideal_tokens_per_s=run.num_tokens / (times.seconds * (1 - share)),
            round_ms=times.seconds / len(times.lengths_R) * 1e3,
            slow_share=sum(log.num_slow for log in logs) / sum(len(log.passes_P2) for log in logs),
        )

    @property
    def exposed_text(self) -> str:
        """The share, and its range."""
        shares = self.exposed_in_repeats
        spread = f" ({100 * min(shares):.1f} to {100 * max(shares):.1f})" if shares else ""
        return f"{self.exposed_share:.1%}{spread}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One batch size, mode and policy.

    Attributes:
        tokens_per_s: of the steady rounds, with the host.
        planned_tokens_per_s: what the planner's closed form predicts, by a real clock without any host, in
            virtual time with its hosts; None for a policy whose lengths are not fixed.
        tokens_per_round: mean of one sequence.
        measured: by a real clock.
    """

    batch_size: int
    mode: Mode
    policy: str
    num_gpus: int
    num_branches: int
    tokens_per_s: float
    planned_tokens_per_s: float | None
    tokens_per_round: float
    measured: Measured | None = None

    @staticmethod
    def median(repeats: Sequence[Outcome]) -> Outcome:
        """The measurement with the median share of exposed host time; of an even number the lower one."""
        pairs = [(one, one.measured) for one in repeats if one.measured is not None]
        if len(pairs) < 2:
            return repeats[0]
        pairs.sort(key=lambda pair: pair[1].exposed_share)
        chosen, measured = pairs[(len(pairs) - 1) // 2]
        shares = [each.exposed_share for _, each in pairs]
        return dataclasses.replace(chosen, measured=dataclasses.replace(measured, exposed_in_repeats=shares))


@dataclass(frozen=True, kw_only=True)
class EmulationResult:
    """``settings`` are all options; ``figures``: where those of the GPU come from."""

    command: str
    date: str
    settings: dict[str, Any]
    outcomes: Sequence[Outcome]
    figures: str

    def speedup_per_gpu(self, outcome: Outcome) -> float:
        """Tokens per second and GPU, over those of the target alone at this batch size."""
        alone = next(
            one for one in self.outcomes if one.mode == TARGET_ONLY and one.batch_size == outcome.batch_size
        )
        return (outcome.tokens_per_s / outcome.num_gpus) / (alone.tokens_per_s / alone.num_gpus)

    def to_json(self) -> dict[str, Any]:
        outcomes = [
            {**dataclasses.asdict(one), "speedup_per_gpu": self.speedup_per_gpu(one)} for one in self.outcomes
        ]
        return {**vars(self), "outcomes": outcomes}

    def report(self) -> str:
        """The table, and what it means."""
        return "\n\n".join([Table.of(list(self._rows()), num_names=3).console(), *self._remarks()])

    def _rows(self) -> Iterator[dict[str, str | int | None]]:
        for one in self.outcomes:
            branches = f", {one.num_branches} branches" * (one.num_branches > 0)
            row: dict[str, str | int | None] = {
                "batch": one.batch_size,
                "mode": f"{one.mode.removesuffix('branches') or 'asynchronous'}{branches}".strip(),
                "policy": one.policy,
                "tokens/s": f"{one.tokens_per_s:,.0f}",
                "planned": None if one.planned_tokens_per_s is None else f"{one.planned_tokens_per_s:,.0f}",
                "x per GPU": decimals(self.speedup_per_gpu(one)),
                "tokens/round": decimals(one.tokens_per_round),
            }
            if (found := one.measured) is not None:
                row |= {
                    "ideal": f"{found.ideal_tokens_per_s:,.0f}",
                    "round ms": decimals(found.round_ms, 1),
                    "host exposed": found.exposed_text,
                    "slow passes": f"{found.slow_share:.1%}",
                }
            yield row

    def _remarks(self) -> Iterator[str]:
        yield f"x per GPU: over the target alone. Figures of the GPU: {self.figures}."
        found = [one.measured for one in self.outcomes if one.measured is not None]
        if not found:
            yield "planned: the closed form of jobs/plan.py with the same times of hosts and messages."
            return
        yield (
            "ideal: the same tokens without any host time; planned: the closed form of jobs/plan.py without "
            "any host time; exposed: host time for which a GPU that the round needs stands still."
        )
        repeats = self.settings["repeats"]
        if repeats > 1:
            yield (
                f"Of {repeats} measurements of every case, taking turns, the one with the median share of "
                "exposed host time; their range in parentheses."
            )
        num_slow = sum(one.slow_share > FEW_SLOW for one in found)
        if num_slow:
            yield (
                f"In {num_slow} of {len(found)} cases this machine took longer than the emulated "
                f"GPU for more than {FEW_SLOW:.0%} of the passes: their host time is partly the table's. Use "
                "a smaller --vocab_size or batch."
            )
