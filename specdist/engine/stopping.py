"""Where a completion ends: stop tokens, stop strings, length. The end may fall anywhere inside a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdist.engine.sequence import FinishReason, Sequence


@dataclass(frozen=True)
class StopRules:
    """Attributes:
    token_ids: tokens that end a completion; they are its last token, and no part of its text.
    strings: texts that end a completion; they are not part of its text.
    decode: token ids to text, without special tokens.
    """

    decode: Callable[[list[int]], str]
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    def examine(self, sequence: Sequence, new_ids: list[int]) -> tuple[int, FinishReason | None]:
        """How many of the new tokens belong to the completion, and why it ends there, if it does."""
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
        return num_kept, reason

    def text(self, completion_ids: list[int]) -> str:
        """The completion's text, up to the first stop string."""
        text = self.decode(completion_ids)
        return text[: self._first_stop(text)]

    def _first_stop(self, text: str) -> int | None:
        found = [index for string in self.strings if (index := text.find(string)) >= 0]
        return min(found, default=None)
