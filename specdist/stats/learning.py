"""What a draft has learned on the way: counts, and in words."""

from __future__ import annotations

from dataclasses import dataclass, fields

from specdist.stats.regression import NS_PER_S


@dataclass
class Learned:
    """Time, steps, replacements, and of comparisons the tokens, and how many of them the draft and the copy
    would have drafted, in expectation. All of them add up."""

    adapt_ns: int = 0
    num_adapt_steps: int = 0
    num_adapt_switches: int = 0
    num_adapt_judged: int = 0
    num_adapt_by_draft: int = 0
    num_adapt_by_copy: int = 0

    def add_learned(self, other: Learned) -> None:
        for item in fields(Learned):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def forget_learned(self) -> None:
        """Let the counts begin anew."""
        for item in fields(Learned):
            setattr(self, item.name, 0)


def learned(stats: Learned) -> str | None:
    """None where nothing was learned. The shares are of all comparisons, of one draft after the other."""
    if not stats.adapt_ns:
        return None
    times = "once" if stats.num_adapt_switches == 1 else f"{stats.num_adapt_switches:,} times"
    idle_s = stats.adapt_ns / NS_PER_S
    found = f"{stats.num_adapt_steps:,} steps in {idle_s:,.1f} s of idle time, a new draft {times}"
    if not stats.num_adapt_judged:
        return found
    before, after = (
        number / stats.num_adapt_judged for number in (stats.num_adapt_by_draft, stats.num_adapt_by_copy)
    )
    return f"{found}; of the tokens compared the draft drafts {before:.1%}, the copy {after:.1%}"
