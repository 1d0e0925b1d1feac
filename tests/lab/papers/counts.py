"""Passes of a policy, counted on exhaustive traces or in a run, and the time that they take by given costs.

A time is N_draft t_draft + N_target t_target, as SpecDec++ has it (Huang et al. 2024, Eq. 3.1), with c =
t_draft / t_target. So no number depends on how busy the machine was, and the papers' own costs can be used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from specdist.data.stats.shard import Stats
from specdist.lab.replay import ExhaustiveTrace, PromptTrace, ReplaySettings, replay
from specdist.policies.choice import PolicyChoice, build_policy
from specdist.policies.costs import CostModel, Curve

# Not used: passes are counted.
COSTS = CostModel(Curve([1], [1]), Curve([1], [1]))
TOGETHER = ReplaySettings(max_num_seqs=64, max_num_batched_tokens=2**14)
# t_draft / t_target of SpecDec++'s pair (its section 5.2), and of a draft a tenth of its target's size.
LLAMA_2, TENTH = 0.0234 / 0.112, 0.1


@dataclass(frozen=True)
class Counts:
    """Of a policy's rounds after the pass over the prompt: N, N_draft, N_target, and drafted and accepted."""

    num_tokens: int
    num_draft: int
    num_target: int
    num_drafted: int
    num_accepted: int
    num_discarded: int

    @staticmethod
    def of(stats: Stats) -> Counts:
        return Counts(
            stats.num_completion_tokens - stats.num_completions,
            stats.num_draft_row_steps,
            stats.num_row_steps,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            stats.num_discarded,
        )

    def speedup(self, cost_ratio: float) -> float:
        """Over the target alone."""
        return self.num_tokens / (self.num_target + cost_ratio * self.num_draft)

    @property
    def rates(self) -> tuple[float, float]:
        """Verification and discard rate."""
        return self.num_target / self.num_tokens, self.num_discarded / self.num_tokens


def of_policy(name: str, traces: Iterable[ExhaustiveTrace], head: int = 0, **options: float) -> Counts:
    """Of a policy by its name over all these prompts, with the traces' cap unless it is given another."""
    total = Stats()
    for trace in traces:
        if name != "fixed":
            options = {"max_draft_tokens": trace.max_draft_tokens} | options
        policy = build_policy(PolicyChoice.of(name, **options), None, is_coupled=False)
        total.add(replay(policy, trace, COSTS, TOGETHER, head).stats)
    return Counts.of(total)


def best(found: Mapping[float, Counts], cost_ratio: float = LLAMA_2) -> float:
    """The option with the largest speed-up."""
    return max(found, key=lambda option: found[option].speedup(cost_ratio))


def truncated(trace: ExhaustiveTrace, num_tokens: int) -> ExhaustiveTrace:
    """The same completions, as if they had been limited to so many tokens."""
    return ExhaustiveTrace([_truncated(prompt, num_tokens) for prompt in trace.prompts], trace.origin)


def _truncated(prompt: PromptTrace, num_tokens: int) -> PromptTrace:
    length = min(prompt.num_tokens, num_tokens)
    # A round drafts nothing for the last position that the completion may have.
    most_N = np.maximum(num_tokens - 1 - np.arange(length), 0)
    cut = {
        each.name: getattr(prompt, each.name)[:length]
        for each in dataclasses.fields(PromptTrace)
        if each.name.endswith(("_N", "_ND"))
    }
    cut["num_drafted_N"] = np.minimum(cut["num_drafted_N"], most_N)
    cut["num_accepted_N"] = np.minimum(cut["num_accepted_N"], most_N)
    return dataclasses.replace(
        prompt,
        completion_ids=prompt.completion_ids[:length],
        max_new_tokens=num_tokens,
        estimates_END=prompt.estimates_END[:, :length],
        **cut,
    )
