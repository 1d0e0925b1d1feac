"""The result of an emulation, as JSON and as tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdist.lab.plan.hardware import PUBLISHED
from specdist.lab.plan.simulate import Mode
from specdist.utils.table import Table, decimals
from tests.lab.emulation.accounting import HostPath, HostTime, host_path
from tests.lab.emulation.config import TARGET_ONLY
from tests.lab.emulation.session import Run

# More slow passes than this make a result one of this machine, not of the emulated GPU.
FEW_SLOW = 0.01
SPEEDUP = "speedup_per_device"
HOSTS = ("target_host", "draft_host")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One batch size, mode and policy.

    Attributes:
        tokens_per_s: of the steady rounds, with the host.
        ideal_tokens_per_s: the same tokens in the time that the rounds' passes need by the planner, without
            any host: see :mod:`tests.lab.emulation.accounting`.
        planned_tokens_per_s: what the planner's closed form predicts without any host; None for a policy
            whose lengths are not fixed.
        exposed_host_share: of the rounds' time; ``exposed_in_repeats``: of all measurements, if there were
            several, of which this one is the median.
        round_ms, tokens_per_round: means; the tokens are those of one sequence.
        path: what the host does while no device works.
        slow_share: passes for which this machine took longer than the emulated GPU.
    """

    batch_size: int
    mode: Mode
    policy: str
    num_gpus: int
    num_rounds: int
    num_ahead_tokens: int
    num_branches: int
    tokens_per_s: float
    ideal_tokens_per_s: float
    planned_tokens_per_s: float | None
    exposed_host_share: float
    round_ms: float
    tokens_per_round: float
    target_host: HostTime
    draft_host: HostTime | None
    slow_share: float
    path: HostPath | None = None
    exposed_in_repeats: Sequence[float] = ()

    @staticmethod
    def median(repeats: Sequence[Outcome]) -> Outcome:
        """The measurement with the median share of exposed host time; of an even number the lower one."""
        ordered = sorted(repeats, key=lambda one: one.exposed_host_share)
        shares = [one.exposed_host_share for one in ordered] if len(ordered) > 1 else []
        return dataclasses.replace(ordered[(len(ordered) - 1) // 2], exposed_in_repeats=shares)

    @property
    def exposed_text(self) -> str:
        """The share, and its range."""
        shares = self.exposed_in_repeats
        spread = f" ({100 * min(shares):.1f} to {100 * max(shares):.1f})" if shares else ""
        return f"{self.exposed_host_share:.1%}{spread}"

    def at_full_pace(self, slowdown: int) -> Outcome:
        """Of passes that took so many times as long; host times stay as they were measured."""
        return dataclasses.replace(
            self,
            tokens_per_s=slowdown * self.tokens_per_s,
            ideal_tokens_per_s=slowdown * self.ideal_tokens_per_s,
            round_ms=self.round_ms / slowdown,
        )

    @staticmethod
    def of(run: Run, *, batch_size: int, **about: Any) -> Outcome:
        times, num_rounds = run.times, len(run.times.lengths_R)
        logs = [log for log in (run.target, run.draft) if log is not None]
        share = times.exposed_share
        return Outcome(
            batch_size=batch_size,
            num_rounds=num_rounds,
            tokens_per_s=run.num_tokens / times.seconds,
            ideal_tokens_per_s=run.num_tokens / (times.seconds * (1 - share)),
            exposed_host_share=share,
            round_ms=times.seconds / num_rounds * 1e3,
            tokens_per_round=run.num_tokens / num_rounds / batch_size,
            target_host=times.target,
            draft_host=times.draft,
            path=host_path(run.edges_R1, run.target, run.draft),
            slow_share=sum(log.num_slow for log in logs) / sum(len(log.passes_P2) for log in logs),
            **about,
        )


@dataclass(frozen=True, kw_only=True)
class EmulationResult:
    """``settings`` are all options; ``figures``: where those of the GPU come from."""

    command: str
    date: str
    settings: dict[str, Any]
    outcomes: Sequence[Outcome]
    figures: str = PUBLISHED

    def speedup_per_device(self, outcome: Outcome) -> float:
        """Tokens per second and GPU, over those of the target alone at this batch size."""
        alone = next(
            one for one in self.outcomes if one.mode == TARGET_ONLY and one.batch_size == outcome.batch_size
        )
        return (outcome.tokens_per_s / outcome.num_gpus) / (alone.tokens_per_s / alone.num_gpus)

    def to_json(self) -> dict[str, Any]:
        outcomes = [
            {**dataclasses.asdict(one), SPEEDUP: self.speedup_per_device(one)} for one in self.outcomes
        ]
        return {**vars(self), "outcomes": outcomes}

    @staticmethod
    def read(path: Path) -> EmulationResult:
        """What :meth:`to_json` has written."""
        return EmulationResult.from_json(json.loads(path.read_text(encoding="utf-8")))

    @staticmethod
    def from_json(document: dict[str, Any]) -> EmulationResult:
        """Of what :meth:`to_json` has made."""
        outcomes = []
        about = {name: value for name, value in document.items() if name != "outcomes"}
        for given in document["outcomes"]:
            one = {name: value for name, value in given.items() if name != SPEEDUP}
            hosts: dict[str, Any] = {name: one.pop(name) for name in HOSTS}
            hosts = {name: found and HostTime(**found) for name, found in hosts.items()}
            found: dict[str, float] | None = one.pop("path", None)
            outcomes.append(Outcome(**one, **hosts, path=HostPath(**found) if found else None))
        return EmulationResult(**about, outcomes=outcomes)

    def markdown(self) -> str:
        """For a README, with what it was measured with."""
        given = self.settings
        title = (
            f"**{given['target']} on {given['tp_size']} {given['emulate']} with draft {given['draft']}; "
            f"prompts of {given['prompt_tokens']} tokens, completions of {given['output_tokens']}; "
            f"acceptance {given['acceptance']:g}{', greedy' if not given['temperature'] else ''}**"
        )
        return f"{title}\n\n{self.report(Table.markdown)}\n\n{self.date}: `{self.command}`"

    def summary(self) -> dict[str, Any]:
        """The job's last line."""
        return {
            "gpu": self.settings["emulate"],
            "figures": self.figures,
            "target": self.settings["target"],
            "draft": self.settings["draft"],
            "results": [
                {
                    "batch_size": one.batch_size,
                    "mode": one.mode,
                    "policy": one.policy,
                    "tokens_per_s": round(one.tokens_per_s, 2),
                    "ideal_tokens_per_s": round(one.ideal_tokens_per_s, 2),
                    "exposed_host_share": round(one.exposed_host_share, 4),
                    SPEEDUP: round(self.speedup_per_device(one), 4),
                    "slow_share": round(one.slow_share, 4),
                }
                for one in self.outcomes
            ],
        }

    def report(self, render: Callable[[Table], str] = Table.console) -> str:
        """The table, and what it means."""
        return "\n\n".join([render(Table.of(list(self._rows()), num_names=3)), *self._remarks()])

    def _rows(self) -> Iterator[dict[str, str | int | None]]:
        for one in self.outcomes:
            draft = one.draft_host
            branches = f", {one.num_branches} branches" * (one.num_branches > 0)
            yield {
                "batch": one.batch_size,
                "mode": f"{one.mode.removesuffix('branches') or 'asynchronous'}{branches}".strip(),
                "policy": one.policy,
                "tokens/s": f"{one.tokens_per_s:,.0f}",
                "ideal": f"{one.ideal_tokens_per_s:,.0f}",
                "planned": None if one.planned_tokens_per_s is None else f"{one.planned_tokens_per_s:,.0f}",
                "x per GPU": decimals(self.speedup_per_device(one)),
                "tokens/round": decimals(one.tokens_per_round),
                "round ms": decimals(one.round_ms, 1),
                "host exposed": one.exposed_text,
                "target exposed ms": decimals(one.target_host.exposed_ms),
                "hidden ms": decimals(one.target_host.hidden_ms),
                "draft exposed ms": decimals(None if draft is None else draft.exposed_ms),
                "draft hidden ms": decimals(None if draft is None else draft.hidden_ms),
                "slow passes": f"{one.slow_share:.1%}",
            }

    def _remarks(self) -> list[str]:
        remarks = [
            "ideal: the same tokens without any host time; planned: the closed form of jobs/plan.py without "
            "any host time; x per GPU: over the target alone; exposed: host time for which a GPU that the "
            "round needs stands still; hidden: host time while it works."
        ]
        remarks.append(f"Figures of the GPU: {self.figures}.")
        slowdown = self.settings.get("slowdown", 1)
        if slowdown > 1:
            remarks.append(
                f"Passes took {slowdown} times as long, and rates are given as if they had not: the host's "
                "share is as many times too small."
            )
        repeats = self.settings.get("repeats", 1)
        if repeats > 1:
            remarks.append(
                f"Of {repeats} measurements of every case, taking turns, the one with the median share of "
                "exposed host time; their range in parentheses."
            )
        slow = [one for one in self.outcomes if one.slow_share > FEW_SLOW]
        if slow:
            remarks.append(
                f"In {len(slow)} of {len(self.outcomes)} cases this machine took longer than the emulated "
                f"GPU for more than {FEW_SLOW:.0%} of the passes: their host time is partly the table's. Use "
                "a smaller --vocab_size or batch."
            )
        return remarks
