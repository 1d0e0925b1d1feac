"""The greedy oracle: the bound of every length policy (SpecDec++, Huang et al. 2024, Theorem 4.1).

It drafts exactly as far as the target will accept. With S the set of positions at which the draft's likeliest
token differs from the target's,

    N_discarded = 0,    N_target = |S| + 1.

Here a completion's first token comes from the pass over its prompt, which is not a verification, and after
its last token nothing is verified: S counts the positions between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdist.replay.trace import ExhaustiveTrace


@dataclass(frozen=True)
class Oracle:
    """Not a policy for live runs: :func:`specdist.replay.replay` looks the answers up in the trace."""

    @staticmethod
    def max_draft_tokens(trace: ExhaustiveTrace) -> int:
        """No cap except the length of a completion."""
        return max(prompt.max_new_tokens for prompt in trace.prompts)
