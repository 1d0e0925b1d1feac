"""What a draft has learned on the way, in words."""

from __future__ import annotations

from specdist.stats.regression import NS_PER_S
from specdist.stats.shard import Stats


def learned(stats: Stats) -> str | None:
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
