"""What a run's prompts promise: how large its passes can be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The same on every rank.

    Attributes:
        num_rows: sequences of the run, of which so many may run at a time at most; None where unknown.
        num_context_tokens: typical number of tokens before a pass: of a prompt and half a completion.
        text_ids: tokens of some prompts, one after the other, for models whose passes depend on them: those
            with experts, which other tokens choose otherwise.
    """

    num_rows: int | None = None
    num_context_tokens: int = 0
    text_ids: tuple[int, ...] = ()

    def rows_at_a_time(self, num_slots: int) -> int:
        """Sequences in the largest batch."""
        return num_slots if self.num_rows is None else max(1, min(num_slots, self.num_rows))
