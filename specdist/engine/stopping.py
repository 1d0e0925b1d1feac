"""Where a completion ends: stop token, stop string or length. The end may fall anywhere inside a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdist.engine.sequence import FinishReason, Sequence


@dataclass(frozen=True)
class StopCheck:
    """How many of the new tokens belong to the completion, and why it ends there, if it does."""

    num_kept: int
    reason: FinishReason | None


@dataclass(frozen=True)
class StopRules:
    """What ends a completion, besides its maximum length.

    Attributes:
        decode: token ids to text, without special tokens.
        token_ids: stop tokens; a completion's last token may be one, its text does not contain it.
        strings: stop strings; a completion's text ends before the first of them.
    """

    decode: Callable[[list[int]], str]
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    def check(self, sequence: Sequence, new_ids: list[int]) -> StopCheck:
        """Look for the first stop in tokens that are about to be appended."""
        reason: FinishReason | None = None
        num_kept = len(new_ids)
        room = sequence.max_length - len(sequence.token_ids)
        if num_kept >= room:
            num_kept, reason = room, "length"
        for index, token_id in enumerate(new_ids[:num_kept]):
            if token_id in self.token_ids:
                num_kept, reason = index + 1, "stop"
                break
        if self.strings:
            committed = sequence.token_ids[sequence.num_prompt_tokens :]
            if self._first_stop(self.decode(committed + new_ids[:num_kept])) is not None:
                num_kept = next(
                    count
                    for count in range(1, num_kept + 1)
                    if self._first_stop(self.decode(committed + new_ids[:count])) is not None
                )
                reason = "stop"
        return StopCheck(num_kept, reason)

    def text(self, completion_ids: list[int]) -> str:
        """The completion's text, up to the first stop string."""
        text = self.decode(completion_ids)
        return text[: self._first_stop(text)]

    def _first_stop(self, text: str) -> int | None:
        found = [index for string in self.strings if (index := text.find(string)) >= 0]
        return min(found, default=None)
