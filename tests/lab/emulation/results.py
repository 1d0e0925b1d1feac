"""The result of an emulation, as JSON and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdist.lab.plan.simulate import Mode
from specdist.utils.table import Table, decimals
from tests.lab.emulation.config import TARGET_ONLY


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One batch size, mode and policy.

    Attributes:
        tokens_per_s: of the steady rounds, with the host.
        planned_tokens_per_s: what the planner's closed form predicts, with the same times of hosts; None for
            a policy whose lengths are not fixed.
        tokens_per_round: mean of one sequence.
    """

    batch_size: int
    mode: Mode
    policy: str
    num_gpus: int
    num_branches: int
    tokens_per_s: float
    planned_tokens_per_s: float | None
    tokens_per_round: float


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
        return "\n\n".join(
            [
                Table.of(list(self._rows()), num_names=3).console(),
                f"x per GPU: over the target alone. Figures of the GPU: {self.figures}.",
                "planned: the closed form of jobs/plan.py with the same times of hosts and messages.",
            ]
        )

    def _rows(self) -> Iterator[dict[str, str | int | None]]:
        for one in self.outcomes:
            branches = f", {one.num_branches} branches" * (one.num_branches > 0)
            yield {
                "batch": one.batch_size,
                "mode": f"{one.mode.removesuffix('branches') or 'asynchronous'}{branches}".strip(),
                "policy": one.policy,
                "tokens/s": f"{one.tokens_per_s:,.0f}",
                "planned": None if one.planned_tokens_per_s is None else f"{one.planned_tokens_per_s:,.0f}",
                "x per GPU": decimals(self.speedup_per_gpu(one)),
                "tokens/round": decimals(one.tokens_per_round),
            }
