"""What a run loses by the few passes that it times at its start: ``python -m tests.lab.plan.timed_costs``.

The automatic choice of every round, in virtual time (``virtual_rounds.py``), decides once by the times of
every power of two up to the largest pass, and once by those that the job's own code takes within its budget,
of passes that chance makes longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from dataclasses import dataclass

import numpy as np

from specdist.job.costs.measuring import (
    DRAFT_SHARE,
    DRAFT_SLOPES_SHARE,
    TARGET_SHARE,
    TARGET_SLOPES_SHARE,
    timed_model,
)
from specdist.job.costs.pass_times import Budget
from specdist.policies.costs import BRANCH_COUNTS, ContextCosts, CostModel
from tests.lab.plan.sweep import ACCEPTANCES, CATCHING, automatic
from tests.lab.plan.virtual_rounds import LONGEST, MAX_DRAFT_TOKENS, SHORTEST, Machine, Setting

LONGEST_CONTEXT = 100_000


@dataclass
class Clock:
    """Passes of one model, which move it. ``noise``: mean of what chance adds to a pass, as a part of it."""

    machine: Machine
    is_draft: bool
    noise: float
    generator: np.random.Generator
    now_ns: int = 0

    def __call__(self, num_rows: int, num_tokens: int, context: int) -> int:
        machine = self.machine
        own_ns = (
            machine.draft_ns(num_rows, context)
            if self.is_draft
            else machine.target_ns(num_tokens, num_rows, context)
        )
        ns = round(own_ns * (1 + self.generator.exponential(self.noise)))
        self.now_ns += ns
        return ns


def timed_costs(
    machine: Machine, num_slots: int, context: int, budget_s: float, noise: float, seed: int
) -> CostModel:
    """As :meth:`Machine.measured`, by the job's own code."""
    generator = np.random.default_rng(seed)
    clocks = [Clock(machine, is_draft, noise, generator) for is_draft in (False, True)]
    found = []
    for clock, shares, per_row, widest in (
        (clocks[0], (TARGET_SHARE, TARGET_SLOPES_SHARE), MAX_DRAFT_TOKENS + 1, None),
        (clocks[1], (DRAFT_SHARE, DRAFT_SLOPES_SHARE), 1, num_slots * (1 + BRANCH_COUNTS[-1])),
    ):
        budget = Budget(budget_s * 1e9 - clocks[0].now_ns * clock.is_draft, lambda clock=clock: clock.now_ns)
        fits, slopes_fit = map(budget.until, shares)
        found.append(
            timed_model(
                clock,
                num_rows=num_slots,
                num_tokens_per_row=per_row,
                largest=widest or num_slots * per_row,
                most_rows=widest,
                contexts=(context, LONGEST_CONTEXT),
                fits=fits,
                slopes_fit=slopes_fit,
                prepares=True,
            )
        )
    of_target, of_draft = found
    known = machine.measured(num_slots, context)
    slopes = ContextCosts(context, num_slots, *of_target.slopes, of_draft.slopes[0])
    return dataclasses.replace(known, target=of_target.passes, draft=of_draft.passes, context=slopes)


def ratio(machine: Machine, setting: Setting, budget_s: float, noise: float) -> tuple[float, int]:
    """Tokens per second with the costs of a budget over those with the full costs; and the timed sizes."""
    context = setting.context_tokens + (SHORTEST + LONGEST) // 4
    costs = timed_costs(machine, setting.num_slots, context, budget_s, noise, setting.seed)
    full = automatic(machine, setting).run()
    return automatic(machine, setting, costs).run() / full, len(costs.target.sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="70b")
    parser.add_argument("--draft", default="1b")
    parser.add_argument("--gpu", default="h100-sxm")
    parser.add_argument("--tp_size", type=int, default=4)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=(1, 8, 32, 128))
    parser.add_argument("--contexts", type=int, nargs="+", default=(100, 8_000))
    parser.add_argument("--budgets", type=float, nargs="+", default=(3.0, 0.3, 0.0), help="in seconds")
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    machine = Machine.of(options.target, options.draft, options.gpu, options.tp_size)
    for budget_s, num_slots, context in itertools.product(
        options.budgets, options.batch_sizes, options.contexts
    ):
        found = []
        for acceptance, seed in itertools.product(ACCEPTANCES, range(options.seeds)):
            setting = Setting(
                num_slots=num_slots,
                context_tokens=context,
                acceptance=acceptance,
                catching=CATCHING,
                seed=seed,
            )
            found.append(ratio(machine, setting, budget_s, options.noise))
        ratios = " ".join(f"{each:.3f}" for each, _ in found)
        sys.stdout.write(
            f"budget {budget_s:g} s, batch {num_slots}, context {context}: {found[0][1]} sizes; {ratios}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
