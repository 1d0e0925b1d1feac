"""What a run's prompts promise: how large its passes can be, and about how much work they are."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdist.policies.costs import Curve

# The last tokens of every prompt that are kept.
NUM_TEXT_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The same on every rank.

    Attributes:
        num_rows: sequences of the run, of which so many may run at a time at most; None where unknown.
        num_context_tokens: typical number of tokens before a pass.
        num_prompt_tokens, num_new_tokens: of all prompts, and of all completions at most.
        text_ids: tokens of some prompts, one after the other, for models whose passes depend on them: those
            with experts, which other tokens choose otherwise.
    """

    num_rows: int | None = None
    num_context_tokens: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    text_ids: tuple[int, ...] = ()

    @staticmethod
    def of(
        lengths: Iterable[tuple[int, int]],
        *,
        num_prompts: int,
        num_completions: int | None = None,
        prompts: Iterable[Sequence[int]] = (),
    ) -> Workload:
        """
        Args:
            lengths: of some of the prompts, its tokens and the most tokens of a completion.
            num_completions: by default one for each prompt.
            prompts: some of them, if their tokens are to be kept.
        """
        known = list(lengths) or [(0, 0)]
        num_completions = num_prompts if num_completions is None else num_completions
        prompt_tokens, new_tokens = (statistics.mean(each) for each in zip(*known, strict=True))
        return Workload(
            num_rows=num_completions,
            num_context_tokens=typical_context(known),
            num_prompt_tokens=round(num_prompts * prompt_tokens),
            num_new_tokens=round(num_completions * new_tokens),
            text_ids=tuple(token_id for ids in prompts for token_id in ids[-NUM_TEXT_TOKENS:]),
        )

    def rows_at_a_time(self, num_slots: int) -> int:
        """Sequences in the largest batch."""
        return num_slots if self.num_rows is None else max(1, min(num_slots, self.num_rows))

    def ns(self, target: Curve, num_slots: int) -> float:
        """About what the target's passes over all of it take without a draft.

        ``target``: times of passes over a token of every row, and over more.
        """
        rows = self.rows_at_a_time(num_slots)
        row_ns = float(target(rows)) / rows
        token_ns = float(target(2 * target.sizes[-1]) - target(target.sizes[-1])) / target.sizes[-1]
        return self.num_new_tokens * row_ns + self.num_prompt_tokens * min(token_ns or row_ns, row_ns)


UNKNOWN_WORK = Workload()


def typical_context(lengths: Iterable[tuple[int, int]]) -> int:
    """Typical number of tokens before a pass: those of a prompt and of half a completion.

    ``lengths``: of each prompt, its tokens and the most tokens of a completion.
    """
    return int(statistics.median(prompt + longest // 2 for prompt, longest in lengths))
